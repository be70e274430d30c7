"""Where torch meets fastserial: choose, verify, build and swap patches; the hooks."""
