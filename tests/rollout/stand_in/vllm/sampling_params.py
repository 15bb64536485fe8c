class RequestOutputKind:
    DELTA = "delta"
