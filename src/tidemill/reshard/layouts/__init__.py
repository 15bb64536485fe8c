"""How one model's tensors lie over ranks: as data, from tensors, from a word such as `tp4,dp4`, as plain values."""
