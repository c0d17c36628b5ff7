"""Every failure that pdd reports: what happened, and what to do next.

A class fixes what a failure *ends* (one request, one attempt, one peer, the daemon), its exit code, its HTTP status,
and whether the caller may try again. Expected shortage is a value (`None`, an enum member), never an exception.
"""

from __future__ import annotations

import errno

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_NOT_PERMITTED = 4
EXIT_REFUSED = 5
EXIT_TIMEOUT = 6
EXIT_CHECK = 7
EXIT_VERSION = 8
EXIT_DEVICE_MISSING = 69
EXIT_IN_USE = 73
EXIT_ENGINE_DIED = 75
EXIT_LIMITS = 77
EXIT_CONFIG = 78


class PddError(Exception):
    """Root of the tree. `str(error)` is one sentence; `hint` says what to do next.

    An `id` belongs to the class that names it; a subclass without one of its own goes by its parent's.
    """

    id = "E001"
    exit_code = EXIT_BUG
    http_status = 500
    openai_type = "server_error"
    retryable = False

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param  # the request field at fault, as OpenAI's errors name it


# -- start-up ---------------------------------------------------------------------------------------------------------
class ConfigError(PddError):
    """A bad key, value or unit. systemd must not restart the unit."""

    id, exit_code, http_status = "E780", EXIT_CONFIG, 422


class ModelError(PddError):
    """The checkpoint is unreadable or of a family pdd does not run."""

    id, exit_code, http_status = "E781", EXIT_CONFIG, 422


class TopologyError(PddError):
    """A file that should describe a machine cannot be read as one, or cannot be written."""

    id, exit_code = "E782", EXIT_CONFIG


HOW_TO_INSTALL = "In pdd's source tree: pip install '.[engine,fabric]', or make setup."


class NotInstalled(PddError):
    """A part of pdd, or a package that it needs, is not there. Starting again does not help."""

    id, exit_code = "E783", EXIT_CONFIG


class LimitError(PddError):
    """A limit or a permission of this process is too small."""

    id, exit_code = "E770", EXIT_LIMITS


class NoSpace(LimitError):
    """A file system is full, or the user's share of it."""

    id = "E771"


def no_space(error: BaseException) -> NoSpace | None:
    """What to say of an error of the system that only says that there is no room; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    what = "the disk quota of this user is used up" if error.errno == errno.EDQUOT else "no space is left on the file system"
    where = f" of {error.filename}" if error.filename else ""
    return NoSpace(f"{what}{where}", hint="`df -h`, `df -i` and `quota` say which is full; make room and try again.")


class AddressInUse(PddError):
    """A port or socket that this node must own is taken."""

    id, exit_code = "E731", EXIT_IN_USE


# -- one request ------------------------------------------------------------------------------------------------------
class RequestError(PddError):
    """Ends one request and nothing else."""

    id, http_status, openai_type = "E400", 400, "invalid_request_error"


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type or out of range."""


class PromptTooLong(RequestError):
    """The request can never fit this model or this node's page pool."""

    id = "E401"


class UnknownModel(RequestError):
    id, http_status = "E404", 404


class Unauthorized(RequestError):
    id, http_status, openai_type = "E410", 401, "authentication_error"


class WrongRole(RequestError):
    """A prefiller was asked for what decoders answer."""

    id, http_status = "E421", 404


class BodyTooLarge(RequestError):
    id, http_status = "E413", 413


class Overloaded(PddError):
    """The bounded queue is full."""

    id, http_status, openai_type, retryable = "E429", 429, "overloaded_error", True


class Draining(PddError):
    id, http_status, openai_type, retryable = "E503", 503, "overloaded_error", True


class NotReady(PddError):
    """The node is still starting: no model is loaded yet."""

    id, http_status, openai_type, retryable = "E505", 503, "service_unavailable", True


class TooManyConnections(PddError):
    """All connections that the API port may hold are at work."""

    id, http_status, openai_type, retryable = "E506", 503, "service_unavailable", True


class RequestCancelled(PddError):
    """The operator or the node ended the request while its client was still waiting."""

    id, http_status, openai_type, retryable = "E499", 503, "service_unavailable", True


class RequestTimeout(PddError):
    """No progress within the deadline of the request's state."""

    id, http_status, openai_type, retryable = "E504", 504, "timeout_error", True


# -- peers and fabric -------------------------------------------------------------------------------------------------
class PeerError(PddError):
    """Ends or retries the attempts of one peer."""

    id, http_status, openai_type, retryable = "E510", 503, "service_unavailable", True


class PeerIncompatible(PeerError):
    """The handshake refused the peer; the message names the fields that differ."""

    id, retryable = "E511", False


class PeerLost(PeerError):
    id = "E512"


class NoPrefiller(PeerError):
    """No live prefiller, and the config allows no local prefill."""

    id = "E513"


class PrefillRefused(PeerError):
    """The prefiller answered that it will not or can not finish this attempt."""

    id = "E514"


class PeerProtocol(PeerError):
    """The other end sent bytes that no peer of this protocol sends. Ends its link."""

    id = "E515"


class PeerUnauthenticated(PeerError):
    """The two ends do not share a token. The message never contains it."""

    id, exit_code, retryable = "E516", EXIT_NOT_PERMITTED, False


class FabricFailure(PeerError):
    """A libfabric call failed; the message names operation, provider and peer."""

    id, exit_code, http_status = "E520", EXIT_DEVICE_MISSING, 502


class WrongContents(PeerError):
    """What a benchmark found in memory is not what was written there."""

    id, retryable = "E521", False


# -- engine -----------------------------------------------------------------------------------------------------------
class EngineError(PddError):
    id, exit_code = "E750", EXIT_ENGINE_DIED


class RankDied(EngineError):
    """A rank process ended or hung. Ends the daemon; systemd restarts it. A client may ask again, or another node."""

    id, http_status, openai_type, retryable = "E751", 503, "service_unavailable", True


class RanksDisagree(EngineError):
    """Ranks that must say the same do not; the message names the rank that differs."""

    id = "E752"


# -- command line -----------------------------------------------------------------------------------------------------
class ControlError(PddError):
    exit_code = EXIT_NO_DAEMON


class UsageError(ControlError):
    """The command line itself is wrong."""

    id, exit_code = "E200", EXIT_USAGE


class DaemonNotRunning(ControlError):
    id = "E301"


class BenchPeerLost(ControlError):
    """The other end of a benchmark cannot be reached, is none, or went away."""

    id = "E302"


class AccessDenied(ControlError):
    id, exit_code, http_status = "E310", EXIT_NOT_PERMITTED, 403


class RefusedInState(ControlError):
    id, exit_code, http_status = "E350", EXIT_REFUSED, 409


class NoSuchRequest(RefusedInState):
    """No live or lately finished request is meant by that id."""

    id, http_status = "E351", 404


class NoSuchPeer(RefusedInState):
    """This node works with nobody of that name or address."""

    id, http_status = "E355", 404


class AmbiguousRequest(RefusedInState):
    """An id that is only the beginning of several, or names several choices of one answer."""

    id = "E354"


class TimedOut(ControlError):
    id, exit_code, http_status = "E360", EXIT_TIMEOUT, 504


class VersionMismatch(ControlError):
    id, exit_code = "E380", EXIT_VERSION


# -- across a process border ------------------------------------------------------------------------------------------
def _by_id(kind: type[PddError]) -> dict[str, type[PddError]]:
    found = {kind.id: kind} if "id" in vars(kind) else {}
    for child in kind.__subclasses__():
        found |= _by_id(child)
    return found


BY_ID = _by_id(PddError)  # the class that an id in a message of another process stands for
