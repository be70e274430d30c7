"""What `fastserial doctor` finds."""
