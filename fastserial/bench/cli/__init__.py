"""The commands `fastserial bench ...`."""
