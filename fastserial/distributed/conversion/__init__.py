"""Sources and targets of `convert` that many ranks wrote: folders of shards."""
