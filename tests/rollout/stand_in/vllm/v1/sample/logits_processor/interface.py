from enum import Enum


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1
