"""Ray itself: started on this machine or joined, with a token, and its errors as one line each."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_rl.cluster.placement import Amount
from vla_rl.config.cluster import RayConfig
from vla_rl.errors import UserError, first_line, require_packages
from vla_rl.monitoring.machine import available_cores

_TOKEN_FILE = Path("~/.ray/auth_token")
_LOG_LINES = 15
_ANSWER_S = 5.0
# RFC 9113, 3.4
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def require_ray() -> None:
    """Raise `MissingPackage` where Ray is not installed, without importing it."""
    require_packages("ray", extra="ray", purpose="cluster=ray")


@contextlib.contextmanager
def ray_session(config: RayConfig) -> Iterator[Any]:
    """The module ``ray``, connected. A Ray that is started here ends with the block; one that this
    process had connected to before stays."""
    require_ray()
    # Nothing calls home, actors are no less urgent than the driver, a machine without a GPU is no
    # reason for a warning, and no process waits for tasks that are never given (two of them take
    # 2 % of a core).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    _authenticate(config)
    import ray

    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if config.address == "local":
        options |= {
            "num_cpus": available_cores(),
            "include_dashboard": config.dashboard,
            "object_store_memory": config.object_store_mib << 20,
        }
    _connect(ray, config, options)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, config: RayConfig, options: dict[str, Any]) -> None:
    """Raise `UserError` where it cannot be. A Ray that is started here gets further chances, since
    it gives up on itself after half a minute, which a busy machine may need."""
    if config.address != "local":
        _require_answer(config)
    logger = logging.getLogger("ray")
    level, attempts = logger.level, 3 if config.address == "local" else 1
    for attempt in range(attempts):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Ray's own code, about itself
                logger.setLevel(logging.ERROR)  # it warns that it asks for a token, as it should
                ray.init(address=config.address, **options)
            return
        except Exception as error:  # (Ray says it with all kinds of them, the bare one too)
            if attempt + 1 < attempts and "timed out during startup" in str(error):
                ray.shutdown()
                continue
            raise UserError(_refused(config, error)) from error
        finally:
            logger.setLevel(level)


def _require_answer(config: RayConfig) -> None:
    """Raise `UserError` unless a gRPC server answers where the head of the cluster should be. Ray
    itself would knock for many minutes, and say so in its log alone."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        address = canonicalize_bootstrap_address(config.address)
    except Exception as error:  # (of any kind: it looks through processes and files)
        raise UserError(_refused(config, error)) from error
    if address is None:
        return  # there is none on this machine, which Ray says at once
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_ANSWER_S
        ) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(_HTTP2_PREFACE)
                # a SETTINGS frame, with which every server begins
                if connection.makefile("rb").read(4)[3:] != b"\x04":
                    raise ConnectionError("what listens there is not Ray")
    except (OSError, ValueError) as error:
        raise UserError(_refused(config, error)) from error


def _refused(config: RayConfig, error: BaseException) -> str:
    text = f"{type(error).__name__}: {first_line(error)}"
    if config.address == "local":
        return (
            f"Ray could not be started on this machine ({text}). Its logs are in "
            "ray/session_latest/logs under RAY_TMPDIR (/tmp); without it the run works with "
            "cluster=local"
        )
    return (
        f"cluster.address={config.address}: no cluster of Ray answers there that this machine may "
        f"join ({text}). Start one with 'ray start --head', give all nodes the same versions of "
        "Python and Ray and the same token (RAY_AUTH_TOKEN), or use cluster.address=local"
    )


def _authenticate(config: RayConfig) -> None:
    """Whoever reaches Ray's ports can run code, and they listen on all interfaces: so there is
    always a token.

    Where RAY_AUTH_MODE says nothing, Ray asks for one by itself: always in a cluster that it starts
    here, in others where there is one.
    """
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if config.address == "local":
        if not given:  # of this process and its children alone, never on the disk
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        return
    if not given and not _TOKEN_FILE.expanduser().exists() and not config.trusted_network:
        raise UserError(
            f"cluster.address={config.address}: this machine has no token for a cluster of Ray, "
            "and one without a token runs the code of whoever reaches its ports. Set "
            "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN on all nodes before 'ray start', or "
            "cluster.trusted_network=true where the network keeps others out"
        )


def nodes_of(ray: Any) -> list[Amount]:
    """What the nodes of the cluster have in all, whoever has it."""
    return [amount(node) for node in alive(ray)]


def amount(node: Mapping[str, Any]) -> Amount:
    """What a node has, of which Ray tells so."""
    has = node["Resources"]
    return Amount(has.get("CPU", 0.0), has.get("GPU", 0.0))


def alive_nodes(ray: Any) -> frozenset[str]:
    """The ids of the nodes that Ray believes to be there."""
    return frozenset(node["NodeID"] for node in alive(ray))


def alive(ray: Any) -> list[dict[str, Any]]:
    """What Ray tells of the nodes that it believes to be there."""
    return [node for node in ray.nodes() if node["Alive"]]


def put(ray: Any, data: Any) -> Any:
    """A reference to ``data``. Raises `UserError` where the store has no room."""
    try:
        return ray.put(data)
    except ray.exceptions.RayError as error:
        cause_of(ray, error)
        raise


def cause_of(ray: Any, error: Exception) -> Exception:
    """What went wrong inside an actor, or with it. Raises it where it is a `UserError`, and one
    where Ray's store has no room."""
    cause: Exception = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, UserError):
        raise cause from None
    if isinstance(cause, (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)):
        raise UserError(
            "Ray's object store is full, and so is the disk that it spills to "
            f"({type(cause).__name__}): make room under RAY_TMPDIR (/tmp), raise "
            "cluster.object_store_mib, or have fewer episodes under way (rl.episodes_per_iteration, "
            "cluster.max_staleness)"
        ) from None
    return cause


def dashboard(ray: Any) -> str:
    """Where Ray's own pages are; empty where there are none."""
    return ray._private.worker.get_dashboard_url() or ""


def log_tail(ray: Any, pid: int) -> str:
    """The last lines that the actor with this process id wrote, where its log is on this
    machine."""
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    lines: list[str] = []
    for path in sorted(logs.glob(f"worker-*-{pid}.*")):
        with contextlib.suppress(OSError):
            lines += path.read_text(errors="replace").splitlines()
    # (Ray's own marks begin with a colon)
    kept = [line for line in lines if line.strip() and not line.startswith(":")]
    return "\n  ".join(kept[-_LOG_LINES:])
