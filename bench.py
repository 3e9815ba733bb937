#!/usr/bin/env python
"""Seconds of forward, update and decode at the real size on one GPU: `python bench.py --help` (bench/speed.py)."""

from bench.speed import main

if __name__ == "__main__":
    main()
