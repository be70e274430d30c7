"""Buffers, storages, devices and streams, huge pages."""
