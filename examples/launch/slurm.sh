#!/usr/bin/env bash
# SLURM: one task per worker, a notice before the time limit, and the job queues itself again until it is done.
#
#     sbatch examples/launch/slurm.sh                          what follows the script's name goes to the program
#     sbatch --nodes=1 examples/launch/slurm.sh --max-steps 5000
#
# Submit it from the folder that holds examples/, which all hosts see. Every start goes on from the newest checkpoint,
# on however many tasks it gets, up to the lanes: the weights are those of a run that was never stopped.

#SBATCH --job-name=paceline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# With accelerators, one for each task:   --gpus-per-task=1
# --signal: two minutes before the limit every task hears of it, finishes its step, saves, and leaves with code 75.

set -u

RUN_DIR=${RUN_DIR:-runs/slurm}
PYTHON=${PYTHON:-python}
export PACELINE_LANES=${PACELINE_LANES:-8}              # for the life of the job, also when it gets fewer tasks
export PACELINE_THREADS=${PACELINE_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# srun's own code is the highest of its tasks. Tasks that left with 75 must not have the others killed, which are saving.
srun --kill-on-bad-exit=0 "$PYTHON" examples/gpt.py --output-dir "$RUN_DIR" --resume-from-checkpoint true "$@"
code=$?

if [ "$code" -eq 75 ]; then
    echo "stopped on request; job $SLURM_JOB_ID queues again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
