"""What Slurm's commands answer, without Slurm: a runner for the adapter, faithful in the parts that matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from joulery.adapters.clusters.slurm_commands import Done
from joulery.adapters.clusters.slurm_nodes import FIELDS
from joulery.adapters.clusters.slurm_records import COLUMNS, expand_tasks
from joulery.adapters.clusters.tres import parse_gpus


@dataclass
class FakeSlurm:
    """Jobs as ``squeue --json`` of 22.05 prints them; ``scontrol`` changes them by Slurm's rules."""

    jobs: dict[int, dict[str, Any]] = field(default_factory=dict)
    nodes: list[tuple[str, str, str]] = field(default_factory=lambda: [(f"g{n}", "idle", "gpu:fake:2") for n in (1, 2)])
    partitions: dict[str, str] = field(default_factory=dict)
    features: dict[str, str] = field(default_factory=dict)
    reservations: list[str] = field(default_factory=list)
    tiers: dict[str, int] = field(default_factory=dict)
    json: bool = True
    away: bool = False
    forbidden: bool = False
    rights: str = "admin"
    """Of this user, as in 22.05: admin, operator (no AdminComment) or user (jobs of ``ada`` alone, no SiteFactor)."""
    commands: list[tuple[str, ...]] = field(default_factory=list)

    def submit(self, number: int, **changes: Any) -> None:
        self.jobs[number] = {
            "job_id": number, "name": "train", "user_name": "ada", "partition": "train", "job_state": "PENDING",
            "state_reason": "Priority", "submit_time": 1795155977, "node_count": 1, "cpus": 1, "tasks": 1,
            "tres_per_node": "gres:gpu:1", "tres_per_job": "", "tres_per_task": "", "comment": "joulery:min=1,max=4",
            "admin_comment": "", "batch_flag": True, "requeue": True, "array_job_id": 0, "het_job_id": 0,
            "restart_cnt": 0, "priority": 5, **changes,
        }  # fmt: skip

    def __call__(self, command: Sequence[str]) -> Done:
        self.commands.append(tuple(command))
        if self.away:
            return Done(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
        if command[0] == "sinfo":
            return Done(0, "".join(map(self._sinfo, self.nodes)), "")
        if command[0] == "sprio":
            waits = (job for job in self.jobs.values() if job["job_state"] == "PENDING" and job["priority"])
            lines = (f"{job['job_id']}|{job['priority']}|{job.get('site_factor', 0)}" for job in waits)
            return Done(0, "\n".join(lines), "")
        if command[0] == "squeue":
            return self._squeue(command)
        if "reservation" in command:
            return Done(0, "\n".join(self.reservations) or "No reservations in the system", "")
        return self._scontrol(command[1], command[2:])

    def _sinfo(self, node: tuple[str, str, str]) -> str:
        name, state, gres = node
        running = [job for job in self.jobs.values() if job["job_state"] == "RUNNING" and job.get("nodes") == name]
        cells = {
            "nodelist": name, "statelong": state, "gres": gres, "features_act": self.features.get(name, "(null)"),
            "gresused": f"gpu:{sum(parse_gpus(job['tres_per_node']).total for job in running)}",
            "partitionname": self.partitions.get(name, "train"), "cpusstate": "0/64/0/64", "memory": "1000",
            "allocmem": "0", "prioritytier": str(self.tiers.get(self.partitions.get(name, "train"), 1)),
        }  # fmt: skip
        return "".join(cells[field].ljust(width) for field, width in FIELDS) + "\n"

    def _squeue(self, command: Sequence[str]) -> Done:
        if "--json" in command:
            if not self.json:
                return Done(1, "", "squeue: unrecognized option '--json'")
            return Done(0, json.dumps({"jobs": [_printed(job) for job in self.jobs.values()]}), "")
        if "-j" in command and int(command[command.index("-j") + 1]) not in self.jobs:
            return Done(1, "", "slurm_load_jobs error: Invalid job id specified")
        lines = []
        for job in self.jobs.values():
            cells = {
                "jobid": job["job_id"], "jobarrayid": job["job_id"], "hetjobid": "N/A",
                "statecompact": {"PENDING": "PD", "RUNNING": "R"}[job["job_state"]], "username": job["user_name"],
                "partition": job["partition"], "name": job["name"], "submittime": "2026-11-20T06:26:17",
                "numnodes": job["node_count"], "numcpus": job["cpus"], "numtasks": job["tasks"],
                "tres-per-node": job["tres_per_node"] or "N/A", "tres-per-job": job["tres_per_job"] or "N/A",
                "tres-per-task": "N/A", "reason": job["state_reason"], "comment": job["comment"] or "(null)",
                "admin_comment": job["admin_comment"] or "(null)", "batchflag": 1, "requeue": 1,
                "restartcnt": job["restart_cnt"], "prioritylong": job["priority"],
            }  # fmt: skip
            lines.append("".join(str(cells[name]).ljust(width) for name, width in COLUMNS))
        return Done(0, "\n".join(lines), "")

    def _scontrol(self, verb: str, words: Sequence[str]) -> Done:
        if verb == "show":
            return Done(0, "SelectTypeParameters    = CR_CORE\n", "")
        if self.forbidden:
            return Done(1, "", "Access/permission denied for job 1")
        if self._denied(verb, words):
            return Done(1, "", f"Access/permission denied for job {words[0].removeprefix('JobId=')}")
        address = words[0].removeprefix("JobId=")
        if "_" in address or "+" in address:
            return self._scontrol_task(verb, address, words)
        numbers = address.split(",")
        if len(numbers) > 1:  # who can have it has it, whatever is said of the others
            each = [self._scontrol(verb, (f"JobId={one}", *words[1:])) for one in numbers]
            wrong = [done.err for done in each if done.code]
            return Done(1 if wrong else 0, "", "\n".join(wrong))
        number = int(numbers[0])
        job = self.jobs.get(number)
        if job is None:
            return Done(1, "", f"Invalid job id specified for job {number}")
        if job["job_state"] == "COMPLETED":
            return Done(1, "", f"Job has already finished for job {number}")
        if verb == "update":
            return self._update(job, dict(word.split("=", 1) for word in words[1:]))
        if verb == "hold":
            job.update(priority=0, state_reason="JobHeldAdmin")  # also while it runs
            return Done(0, "", "")
        if verb == "release":
            job.update(priority=5, state_reason="BeginTime" if job["restart_cnt"] else "Priority")
            return Done(0, "", "")
        assert verb == "requeuehold"
        if job["job_state"] != "RUNNING":
            return Done(1, "", f"Requested operation is presently disabled for job {number}")
        job.update(job_state="PENDING", priority=0, state_reason="JobHeldUser", restart_cnt=job["restart_cnt"] + 1)
        return Done(0, "", "")

    def _denied(self, verb: str, words: Sequence[str]) -> bool:
        if any(word.startswith("AdminComment=") for word in words):
            return self.rights != "admin"
        if any(word.startswith("SiteFactor=") for word in words):
            return self.rights == "user"
        number = words[0].removeprefix("JobId=").split(",")[0].split("_")[0].split("+")[0]
        owner = self.jobs[int(number)]["user_name"] if int(number) in self.jobs else "ada"
        return self.rights == "user" and owner != "ada"

    def _scontrol_task(self, verb: str, address: str, words: Sequence[str]) -> Done:
        """Tasks ``7_3`` and ``7_[3-4]`` of an array, each separated from the rest; component ``7+1``."""
        if "+" in address:
            number = sum(map(int, address.split("+")))
            return self._scontrol(verb, (f"JobId={number}", *words[1:]))
        array, tasks = address.split("_")
        named = expand_tasks(tasks.strip("[]"))
        own = [job for job in self.jobs.values() if job["array_job_id"] == int(array)]
        whole = [job for job in own if expand_tasks(_tasks_of(job)) == named]
        for task in () if whole else named:
            rest = next(job for job in own if task in expand_tasks(_tasks_of(job)))
            left = [number for number in expand_tasks(_tasks_of(rest)) if number != task]
            rest["array_task_string"] = ",".join(map(str, left))
            whole.append({**rest, "job_id": max(self.jobs) + 1, "array_task_string": str(task)})
            self.jobs[whole[-1]["job_id"]] = whole[-1]
        for job in whole:
            done = self._scontrol(verb, (f"JobId={job['job_id']}", *words[1:]))
            if done.code:
                return done
        return Done(0, "", "")

    def _update(self, job: dict[str, Any], changes: dict[str, str]) -> Done:
        shaping = {"NumTasks", "NumCPUs", "NumNodes", "TresPerNode", "TresPerJob"} & changes.keys()
        if shaping and job["job_state"] != "PENDING":
            return Done(1, "", "Job is no longer pending execution")
        order = list(changes)
        if "NumNodes" in changes and order.index("NumNodes") < order.index("NumTasks"):
            return Done(1, "", "Node count specification invalid")
        names = {"NumTasks": "tasks", "NumCPUs": "cpus", "TresPerNode": "tres_per_node", "TresPerJob": "tres_per_job",
                 "AdminComment": "admin_comment", "Comment": "comment"}  # fmt: skip
        for key, value in changes.items():
            if key in names:
                job[names[key]] = int(value) if value.isdigit() else value
            elif key == "NumNodes":
                job["node_count"] = int(value.partition("-")[0])
            elif key == "StartTime":
                job["state_reason"] = "Priority"
            elif key == "SiteFactor":
                job["site_factor"] = int(value)
        return Done(0, "", "")


def _tasks_of(job: dict[str, Any]) -> str:
    return str(job.get("array_task_string") or job.get("array_task_id")).partition("%")[0]


def _printed(job: dict[str, Any]) -> dict[str, Any]:
    """As 22.05 prints it: of a job that waits, the node count is stale, and what was asked for is in a string."""
    asked = {"tres_req_str": f"cpu={job['cpus']},mem=1000M,node={job['node_count']},billing={job['cpus']}"}
    return {**job, **asked, **({"node_count": 3} if job["job_state"] == "PENDING" else {})}
