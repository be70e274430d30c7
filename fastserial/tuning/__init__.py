"""Settings found by measurement, for each device."""
