"""The gated delta rule over packed rows, in chunks of 64 tokens: no dense batches, no padding outside of chunks.

`plan` says where the tokens of a row lie in chunks and what their sequences begin with; `scan` and `conv` are the parts
that go along sequences, each in plain torch and in Triton; `rule` is the arithmetic between them; `layer` is all of a
model's layer.
"""
