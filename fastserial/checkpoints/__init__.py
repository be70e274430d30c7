"""What a user does with a file: open, load_into, verify, inspect, convert."""
