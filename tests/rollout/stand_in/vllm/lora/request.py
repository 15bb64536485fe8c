from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    name: str
    number: int
    path: str
    load_inplace: bool = False
