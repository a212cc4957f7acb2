"""The `jaxtp` command: sweep, inspect, plan and verify."""
