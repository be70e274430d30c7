"""Connections between ranks: messages, errors that are raised on all, exchange of bytes."""
