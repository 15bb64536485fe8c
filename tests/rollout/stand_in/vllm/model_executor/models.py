from types import SimpleNamespace

ModelRegistry = SimpleNamespace(models={})


def supports_lora(model):
    return True
