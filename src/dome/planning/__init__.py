"""What the filter will cost, and what it saves: before training, and over workers."""

from dome.planning.suggestion import Candidate, Suggestion, suggest
from dome.planning.training import Plan, plan
from dome.planning.workers import WorkersPlan, plan_workers

__all__ = [
    "Candidate",
    "Plan",
    "Suggestion",
    "WorkersPlan",
    "plan",
    "plan_workers",
    "suggest",
]
