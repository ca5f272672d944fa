"""Starts, guards and ends processes. Imports only the standard library, so that programs that only start others start fast."""
