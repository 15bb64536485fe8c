"""The dock behind TransferQueue's interface: put `import tidemill.bridges.transfer_queue as tq` in place of
`import transfer_queue as tq`, and nothing else. Names, arguments and results are those of TransferQueue 0.1.11.

What differs: rows that a killed consumer had fetched are given to the next one, and a killed ledger or warehouse comes
back with everything it held."""

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
from tidemill.bridges.transfer_queue.metadata import BatchMeta, KVBatchMeta
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
