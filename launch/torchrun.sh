#!/usr/bin/env bash
# Start the workers of one host with torchrun, by hand or as a step of a Slurm job:
#
#   host 1   pipespec up cluster=hosts.yaml            # with `ssh: none` at the hosts started so;
#                                                     # it waits, and says where the invitation lies
#   host 2   launch/torchrun.sh hosts.yaml beta invitation.json
#   Slurm   srun bash -c 'launch/torchrun.sh hosts.yaml "$(hostname -s)" invitation.json'
#
# The invitation holds a password: copy it with scp, or keep it on a file system that all hosts
# share and only you can read. torchrun starts the workers again when one of them fails. Its own
# rendezvous kinds listen on every address and unpickle what they are sent; ours does neither.
set -euo pipefail
if [ $# -ne 3 ]; then
  echo "usage: launch/torchrun.sh HOSTS.yaml HOST INVITATION" >&2
  exit 2
fi
python=${PYTHON:-python3}
count=$("$python" -m pipespec.cluster.join.manual_host --count "$1" "$2")
exec "$python" -m torch.distributed.run --nnodes=1 --nproc-per-node="$count" \
  --rdzv-backend=pipespec --log-dir=/dev/null --max-restarts=10 --monitor-interval=0.2 \
  -m pipespec.cluster.join.manual_host "$1" "$2" "$3"
