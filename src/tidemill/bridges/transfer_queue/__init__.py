"""The dock behind TransferQueue's interface: put `import tidemill.bridges.transfer_queue as tq` in place of
`import transfer_queue as tq`, and nothing else. Names, arguments and results are those of TransferQueue 0.1.11.

What differs: rows that a killed consumer had fetched are given to the next one, and a killed ledger or warehouse comes
back with everything it held."""

from typing import TYPE_CHECKING, Any

from tidemill.errors import MissingExtra

if TYPE_CHECKING:
    from tidemill.bridges.transfer_queue.client import StorageKeyNotFoundError, TransferQueueClient
    from tidemill.bridges.transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
    from tidemill.bridges.transfer_queue.interface import (
        async_kv_batch_get,
        async_kv_batch_get_by_meta,
        async_kv_batch_put,
        async_kv_clear,
        async_kv_list,
        async_kv_put,
        close,
        get_client,
        get_metrics_endpoint,
        init,
        kv_batch_get,
        kv_batch_get_by_meta,
        kv_batch_put,
        kv_clear,
        kv_list,
        kv_put,
        load_checkpoint,
        save_checkpoint,
    )
    from tidemill.bridges.transfer_queue.meta.batch import BatchMeta
    from tidemill.bridges.transfer_queue.meta.keyed import KVBatchMeta
    from tidemill.bridges.transfer_queue.samplers import (
        BaseSampler,
        GRPOGroupNSampler,
        RankAwareSampler,
        SeqlenBalancedSampler,
        SequentialSampler,
    )

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]

_WHERE = {
    "StorageKeyNotFoundError": "client",
    "TransferQueueClient": "client",
    "StreamingDataLoader": "dataloader",
    "StreamingDataset": "dataloader",
    "async_kv_batch_get": "interface",
    "async_kv_batch_get_by_meta": "interface",
    "async_kv_batch_put": "interface",
    "async_kv_clear": "interface",
    "async_kv_list": "interface",
    "async_kv_put": "interface",
    "close": "interface",
    "get_client": "interface",
    "get_metrics_endpoint": "interface",
    "init": "interface",
    "kv_batch_get": "interface",
    "kv_batch_get_by_meta": "interface",
    "kv_batch_put": "interface",
    "kv_clear": "interface",
    "kv_list": "interface",
    "kv_put": "interface",
    "load_checkpoint": "interface",
    "save_checkpoint": "interface",
    "BatchMeta": "meta.batch",
    "KVBatchMeta": "meta.keyed",
    "BaseSampler": "samplers",
    "GRPOGroupNSampler": "samplers",
    "RankAwareSampler": "samplers",
    "SeqlenBalancedSampler": "samplers",
    "SequentialSampler": "samplers",
}


def __getattr__(name: str) -> Any:
    """Load on first use: the ledger's process needs the samplers, and neither torch nor tensordict."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name in ("tensordict", "msgspec"):
            raise MissingExtra("TransferQueue's interface", error.name, "transferqueue") from None
        raise
