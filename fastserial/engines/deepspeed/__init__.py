"""DeepSpeed's asynchronous I/O operator as an engine."""
