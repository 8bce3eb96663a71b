"""What the filter will cost, before training: in one process, and over workers."""

from dome.planning.training import Plan, plan
from dome.planning.workers import WorkersPlan, plan_workers

__all__ = ["Plan", "WorkersPlan", "plan", "plan_workers"]
