"""The simulator: the real driver, conductor, ledger, samplers and schedules in virtual time, on workers that only take
the time that real ones would."""
