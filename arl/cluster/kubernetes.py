"""A run on Kubernetes: one file of manifests. Servers in a StatefulSet, so that each keeps its name; the trainer as a
Job, or over several nodes as a RayJob, which KubeRay makes a Ray cluster for.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from arl.api.errors import ConfigError
from arl.cluster.description import KubernetesDescription
from arl.cluster.host_script import assigned, flags_in_bash, quoted_path

_PORT, _MIRROR_PORT = 30000, 30900
_OWN_KEYS = ("server", "mirror")
_SCRIPTS, _SHM = "/arl-scripts", "/dev/shm"
_TO_END_S = 30
"""Beside notice_s: how long a pod may take to end."""
_NO_FAILURE = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""A preemption."""
_WRONG_SETTING = {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [2]}}
"""Another try would end like this one."""
_START_PERIOD_S, _LIVE_PERIOD_S, _LIVE_FAILURES = 10, 30, 10

Manifest = dict[str, Any]


def manifests(description: KubernetesDescription) -> str:
    """The manifests for `kubectl apply`; their Secret comes from `secret`."""
    run = _Run(description)
    parts = [(_CLAIM_IS, run.claim())] if description.volume.size else []
    parts += [
        ("The scripts that the pods run.", run.scripts()),
        (_NAMES_ARE, run.service()),
        (_SERVERS_ARE, run.servers()),
        ("Drains of nodes take one server at a time.", run.budget("servers", {"maxUnavailable": 1})),
        *[(_ACCOUNT_IS, part) for part in run.account()],
        (_RAY_JOB_IS, run.ray_job()) if description.trainer.nodes > 1 else (_TRAINER_IS, run.job()),
        (_BUDGET_IS, run.budget("trainer", {"minAvailable": description.trainer.nodes})),
    ]
    return _top(description) + "".join(map(_document, *zip(*parts, strict=True)))


def secret(description: KubernetesDescription, *, new: Sequence[str] = _OWN_KEYS) -> str:
    """The Secret, as JSON, with new keys of these names and those of key_files.

    Raises ConfigError for a file that cannot be read.
    """
    keys = {name: secrets.token_hex(32) for name in new}
    for name, file in description.key_files.items():
        try:
            keys[name] = Path(file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"key_files.{name} is {file}, which cannot be read: {error}") from None
    data = {name: base64.b64encode(key.encode()).decode() for name, key in keys.items()}
    run = _Run(description)
    return json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": run.metadata("keys"), "data": data})


class _Run:
    """The manifests of one run."""

    def __init__(self, description: KubernetesDescription) -> None:
        self._description = description
        self._name = description.name

    def claim(self) -> Manifest:
        volume = self._description.volume
        metadata = {"name": volume.claim, "namespace": self._description.namespace}
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": volume.size}}}
        if volume.storage_class:
            spec["storageClassName"] = volume.storage_class
        return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}

    def scripts(self) -> Manifest:
        several = self._description.trainer.nodes > 1
        data = {"train.sh": self._train_script(), "server.sh": self._server_script()}
        if several:
            data |= {"end.sh": _END, "stay.sh": self._values() + "\n" + _IS_TRAINING + _STAY}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self.metadata("scripts"), "data": data}

    def service(self) -> Manifest:
        ports = [{"name": "http", "port": _PORT}]
        if self._description.has_mirrors:
            ports.append({"name": "mirror", "port": _MIRROR_PORT})
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self._labels("servers"),
            "ports": ports,
        }
        return {"apiVersion": "v1", "kind": "Service", "metadata": self.metadata("servers"), "spec": spec}

    def servers(self) -> Manifest:
        servers = self._description.servers
        pod = self._pod([self._server(), *([self._mirror()] if self._description.has_mirrors else [])])
        spec = {
            "serviceName": f"{self._name}-servers",
            "replicas": servers.nodes * servers.per_node,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": self._labels("servers")},
            "template": {
                "metadata": {"labels": self._labels("servers")},
                "spec": {"terminationGracePeriodSeconds": _TO_END_S, **pod},
            },
        }
        return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": self.metadata("servers"), "spec": spec}

    def budget(self, part: str, allowed: Mapping[str, int]) -> Manifest:
        spec = {**allowed, "selector": {"matchLabels": self._labels(part)}}
        kind = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
        return {**kind, "metadata": self.metadata(part), "spec": spec}

    def account(self) -> list[Manifest]:
        """The manifests that say what the trainer's pods may ask of Kubernetes."""
        group, metadata = "rbac.authorization.k8s.io", self.metadata("trainer")
        rule = {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "resourceNames": [f"{self._name}-servers"]}
        name = metadata["name"]
        subject = {"kind": "ServiceAccount", "name": name, "namespace": metadata["namespace"]}
        role = {"apiGroup": group, "kind": "Role", "name": name}
        in_group = {"apiVersion": f"{group}/v1", "metadata": metadata}
        return [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
            {**in_group, "kind": "Role", "rules": [{**rule, "verbs": ["patch"]}]},
            {**in_group, "kind": "RoleBinding", "subjects": [subject], "roleRef": role},
        ]

    def job(self) -> Manifest:
        trainer = {**self._trainer(), "command": ["bash", f"{_SCRIPTS}/train.sh"]}
        spec = {
            "backoffLimit": self._description.restarts,
            "podFailurePolicy": {"rules": [_NO_FAILURE, _WRONG_SETTING]},
            "template": {
                "metadata": {"labels": self._labels("trainer")},
                "spec": {"restartPolicy": "Never", **self._grace(), **self._pod([trainer], self._account)},
            },
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self.metadata("trainer"), "spec": spec}

    def ray_job(self) -> Manifest:
        trainer = self._description.trainer
        start = {"num-cpus": str(trainer.cpus_per_node)}
        head = {"rayStartParams": {"dashboard-host": "0.0.0.0", **start}, "template": self._ray_pod("end.sh")}
        workers = {
            "groupName": "trainers",
            "replicas": trainer.nodes - 1,
            "minReplicas": trainer.nodes - 1,
            "maxReplicas": trainer.nodes - 1,
            "rayStartParams": start,
            "template": self._ray_pod("stay.sh"),
        }
        spec = {
            "entrypoint": f"bash {_SCRIPTS}/train.sh",
            "backoffLimit": self._description.restarts,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 60,
            "rayClusterSpec": {
                "rayVersion": self._description.ray_version,
                "authOptions": {"mode": "token"},
                "headGroupSpec": head,
                "workerGroupSpecs": [workers],
            },
        }
        return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": self.metadata("trainer"), "spec": spec}

    def metadata(self, part: str) -> Manifest:
        namespace = {"namespace": self._description.namespace}
        return {"name": f"{self._name}-{part}", **namespace, "labels": {"arl/run": self._name}}

    def _labels(self, part: str) -> dict[str, str]:
        return {"arl/run": self._name, "arl/part": part}

    @property
    def _account(self) -> Manifest:
        return {"serviceAccountName": f"{self._name}-trainer"}

    def _grace(self) -> Manifest:
        return {"terminationGracePeriodSeconds": self._description.notice_s + _TO_END_S}

    def _ray_pod(self, before_its_end: str) -> Manifest:
        stop = {"preStop": {"exec": {"command": ["bash", f"{_SCRIPTS}/{before_its_end}"]}}}
        trainer = {**self._trainer(), "lifecycle": stop}
        # Before KubeRay deletes a RayJob, it lets Ray stop the script, which kills it 3 s later if not told otherwise.
        trainer["env"] += [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(self._description.notice_s)}]
        pod = {**self._grace(), **self._pod([trainer], self._account)}
        return {"metadata": {"labels": self._labels("trainer")}, "spec": {"restartPolicy": "Never", **pod}}

    def _pod(self, containers: list[Manifest], account: Manifest | None = None) -> Manifest:
        description = self._description
        chosen: Manifest = dict(account or {"automountServiceAccountToken": False})
        if description.priority_class:
            chosen["priorityClassName"] = description.priority_class
        if description.node_selector:
            chosen["nodeSelector"] = dict(description.node_selector)
        volumes = [
            {"name": "shared", "persistentVolumeClaim": {"claimName": description.volume.claim}},
            {"name": "scripts", "configMap": {"name": f"{self._name}-scripts"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        mounts = [
            {"name": "shared", "mountPath": description.volume.path},
            {"name": "scripts", "mountPath": _SCRIPTS},
            {"name": "shm", "mountPath": _SHM},
        ]
        return {**chosen, "containers": [{**one, "volumeMounts": mounts} for one in containers], "volumes": volumes}

    def _trainer(self) -> Manifest:
        description, trainer = self._description, self._description.trainer
        env = [*self._variables(), self._key("ARL_SERVER_API_KEY", "server"), self._key("ARL_MIRROR_API_KEY", "mirror")]
        env += [self._key(name, name) for name in description.key_files]
        return {
            "name": "trainer",
            "image": description.image,
            "workingDir": description.workdir,
            "env": [*env, {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
            "resources": _resources(trainer.cpus_per_node, trainer.memory_gb, trainer.gpus_per_node),
        }

    def _server(self) -> Manifest:
        servers = self._description.servers
        health = {"httpGet": {"path": "/health", "port": "http"}}
        return {
            "name": "server",
            "image": servers.image or self._description.image,
            "command": ["bash", f"{_SCRIPTS}/server.sh"],
            "env": [*self._variables(), self._key("ARL_SERVER_API_KEY", "server")],
            "ports": [{"name": "http", "containerPort": _PORT}],
            "startupProbe": {
                **health,
                "periodSeconds": _START_PERIOD_S,
                "timeoutSeconds": _START_PERIOD_S,
                "failureThreshold": -(-servers.startup_s // _START_PERIOD_S),
            },
            # A paused server of SGLang says 503 after 20 s; only one that is so for minutes is started again.
            "livenessProbe": {
                **health,
                "periodSeconds": _LIVE_PERIOD_S,
                "timeoutSeconds": _LIVE_PERIOD_S,
                "failureThreshold": _LIVE_FAILURES,
            },
            "readinessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": _START_PERIOD_S},
            "resources": _resources(servers.cpus_per_server, servers.memory_gb, servers.gpus_per_server),
        }

    def _mirror(self) -> Manifest:
        health = {"httpGet": {"path": "/health", "port": "mirror"}, "periodSeconds": _START_PERIOD_S}
        return {
            "name": "mirror",
            "image": self._description.image,
            "command": ["python", "-m", "arl.engine.weights.mirror", "--host", "0.0.0.0", "--port", str(_MIRROR_PORT)],
            "env": [*self._variables(), self._key("ARL_MIRROR_API_KEY", "mirror")],
            "ports": [{"name": "mirror", "containerPort": _MIRROR_PORT}],
            "readinessProbe": health,
            "resources": _resources(1, self._description.servers.memory_gb, 0),
        }

    def _variables(self) -> list[Manifest]:
        return [{"name": name, "value": value} for name, value in self._description.environment.items()]

    def _key(self, variable: str, key: str) -> Manifest:
        return {"name": variable, "valueFrom": {"secretKeyRef": {"name": f"{self._name}-keys", "key": key}}}

    def _values(self) -> str:
        description = self._description
        return assigned({"RUN_DIR": description.run_dir, "NOTICE_S": description.notice_s})

    def _train_script(self) -> str:
        description = self._description
        servers = description.servers
        values = assigned(
            {
                "NAME": self._name,
                "WORKDIR": description.workdir,
                "MODEL": description.model,
                "SERVERS": servers.nodes * servers.per_node,
                "STARTUP_S": servers.startup_s,
                "COMMAND": description.words,
            }
        )
        flags = flags_in_bash(description)
        if description.trainer.nodes > 1:
            flags += "FLAGS+=(--train.ray_address auto)\n"
        train = _TRAIN.format(
            # KubeRay starts every failed trainer again, also after a wrong setting; each would wait for the servers.
            last="code == 0" if description.trainer.nodes > 1 else "code == 0 || code == 2",
            port=_PORT,
            mirrors=_MIRRORS.format(port=_PORT, mirror=_MIRROR_PORT) * description.has_mirrors,
        )
        return f"set -euo pipefail\n{self._values()}{values}{flags}\n{_IS_TRAINING}{train}"

    def _server_script(self) -> str:
        servers = self._description.servers
        values = assigned({"MODEL": self._description.model, "ARGUMENTS": servers.arguments})
        text = _EMBEDDED if servers.kind == "embedded" else _SGLANG
        return f"set -euo pipefail\n{values}\n{text.format(port=_PORT, gpus=max(servers.gpus_per_server, 1))}"


def _resources(cpus: int | None, memory_gb: int | None, gpus: int) -> Manifest:
    amounts: Manifest = {"cpu": str(cpus), "memory": f"{memory_gb}G"}
    return {"requests": amounts, "limits": {**amounts, **({"nvidia.com/gpu": gpus} if gpus else {})}}


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, and no references to parts that occur twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _document(about: str, manifest: Manifest) -> str:
    lines = "".join(f"# {line}\n" for line in about.splitlines())
    return f"---\n{lines}{yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120)}"


def _top(description: KubernetesDescription) -> str:
    copied = "".join(
        f"#   tr -d '\\n' <{quoted_path(file)} >keys/{name}\n" for name, file in description.key_files.items()
    )
    return _TOP.format(name=description.name, namespace=description.namespace, copied=copied)


_TOP = """\
# A run of arl, made by `arl launch`, which applies it together with a Secret, {name}-keys. Without `arl launch`:
#
#   mkdir -m 700 keys
#   for key in server mirror; do python -c 'import secrets; print(secrets.token_hex(32), end="")' >keys/$key; done
{copied}\
#   kubectl -n {namespace} create secret generic {name}-keys --from-file=keys
#   kubectl apply -f {name}.manifests.yaml
#
# A Job cannot be changed. To continue a run that has ended, delete the trainer and apply this file again.
"""
_CLAIM_IS = "The file system that all pods share. It has no label, so that it stays when the run is deleted."
_NAMES_ARE = "Gives each server a name, also before it is ready: arl itself finds out who answers."
_SERVERS_ARE = """\
The servers. Kubernetes starts one again that ends; arl keeps requests from it until it has the current weights.
They need the key of the Secret, because all of the cluster can reach them."""
_ACCOUNT_IS = "The trainer may end the servers, which it does when the run is done; nothing else."
_TRAINER_IS = """\
The trainer: it also runs the script, with its episodes. Before a pod ends, in a preemption too, the run writes a
checkpoint, and the next pod continues from it, when the one before has ended."""
_RAY_JOB_IS = f"{_TRAINER_IS}\nKubeRay, 1.5.1 or newer, makes a Ray cluster for it, which asks for a token."
_BUDGET_IS = "Drains of nodes wait for the end of the run. A preemption by pods of higher priority does not."

_IS_TRAINING = """\
is_training() {  # whether a process holds run_dir
  local code=0
  flock --shared --nonblock --conflict-exit-code 75 "$RUN_DIR/run.lock" true || code=$?
  ((code == 75))
}
"""
_TRAIN = """
mkdir -p "$RUN_DIR"
cd "$WORKDIR"
for ((waited = 0; ; waited += 2)); do
  is_training || break
  ((waited % 60)) || echo "waits for the end of the run that holds $RUN_DIR/run.lock: $(<"$RUN_DIR/run.lock")"
  sleep 2
done

URLS=()
for ((i = 0; i < SERVERS; i++)); do URLS+=("http://$NAME-servers-$i.$NAME-servers:{port}"); done
for url in "${{URLS[@]}}"; do FLAGS+=(--engine.addresses "$url"); done
{mirrors}echo "waits for ${{#URLS[@]}} servers"
python -m arl.cluster.on_node wait "$STARTUP_S" "${{URLS[@]}}"

"${{COMMAND[@]}}" "${{FLAGS[@]}}" &
training=$! code=0
echo "$training" >/tmp/train.pid
trap 'kill -TERM "$training"' TERM
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do  # a signal ended the wait
  code=0
  wait "$training" || code=$?
done
if (({last})); then  # no other pod continues the run
  python -m arl.cluster.on_node scale "$NAME-servers" 0 || echo "the servers stay: end them with kubectl"
fi
exit "$code"
"""
_MIRRORS = """\
MIRRORS=''
for url in "${{URLS[@]}}"; do MIRRORS+=", \\"$url\\": \\"${{url%:{port}}}:{mirror}\\""; done
FLAGS+=(--weights.mirrors "{{${{MIRRORS#, }}}}")
"""
_EMBEDDED = """\
exec python -m arl.engine.local --model "$MODEL" --host 0.0.0.0 --port {port} "${{ARGUMENTS[@]}}"
"""
_SGLANG = """\
umask 077
echo "api-key: $ARL_SERVER_API_KEY" >/tmp/server.yaml  # a command line would show it
unset ARL_SERVER_API_KEY
exec python3 -m sglang.launch_server --config /tmp/server.yaml --model-path "$MODEL" --host 0.0.0.0 --port {port} \\
  --tp-size {gpus} "${{ARGUMENTS[@]}}"
"""
_END = """\
# Before Ray's head ends: the training script writes a checkpoint.
[ -s /tmp/train.pid ] || exit 0
kill -TERM "$(</tmp/train.pid)" || exit 0
while kill -0 "$(</tmp/train.pid)" 2>/dev/null; do sleep 1; done
"""
_STAY = """
# Before a worker of Ray ends: it stays for the checkpoint, if all pods end at once.
for ((left = NOTICE_S; left > 0; left--)); do
  is_training || break
  sleep 1
done
"""
