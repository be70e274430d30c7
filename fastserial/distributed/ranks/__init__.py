"""Connections between ranks: messages, errors that all hear of, exchange of bytes."""
