#!/usr/bin/env bash
# Start the workers of one host with torchrun: by hand, as a step of a Slurm job (slurm.sbatch), or
# in a pod of Kubernetes (kubernetes/).
#
#   host 1   pipespec up cluster=hosts.yaml      # with `ssh: none` at the hosts started so;
#                                               # it waits, and says where the invitation is
#   host 2   launch/torchrun.sh hosts.yaml beta invitation
#
# The invitation holds a password: copy it with scp, or keep it on a file system that all hosts
# share and only you can read. Until it is there, this waits for it. torchrun starts the workers
# again when one of them fails.
set -euo pipefail
exec "${PYTHON:-python3}" -m pipespec.cluster.join.manual_host "$@"
