"""Strategies whose lanes train apart, and meet every few steps: local_sgd and diloco."""
