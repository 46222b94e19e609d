#!/bin/sh
# Train on this machine: launch/local.sh --preset multi_gpu --recipe digits [key=value ...]
exec samerun launch "$@"
