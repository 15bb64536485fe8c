"""What carries blocks of weights: inside one process, or between ranks of one node through shared memory."""
