"""Every error that a user can meet, with the exit code that it ends the process with.

`EchoBatchError` and its children end the job; `RowError` fails one row and never the job.
"""


class EchoBatchError(Exception):
    """Ends the job with one clear line. `exit_code` is what the process returns (docs/configuration.md)."""

    exit_code = 1


class ConfigError(EchoBatchError):
    """Bad flag, unknown key, a plan that does not fit, or a run directory that belongs to another job."""

    exit_code = 2


class ModelError(EchoBatchError):
    """A checkpoint that cannot be loaded or is not supported; names the field or tensor."""

    exit_code = 2


class ScheduleDivergedError(EchoBatchError):
    """A replayed schedule gave other results than when it was recorded: a bug, or other hardware or libraries."""

    exit_code = 11


class InputError(EchoBatchError):
    """Input that exists and cannot be used (wrong type, unknown column, corrupt file)."""

    exit_code = 65


class InputMissingError(EchoBatchError):
    """Input that does not exist."""

    exit_code = 66


class OutputError(EchoBatchError):
    """Output or run directory that cannot be written."""

    exit_code = 73


class InterruptedJobError(EchoBatchError):
    """The job stopped before its end (signal, lost engine, lock held): the same command resumes it."""

    exit_code = 75


class EngineLostError(InterruptedJobError):
    """The device failed under the engine: rows in flight are not done, the rest of the job can be resumed."""


ROW_ERROR_CODES = (
    "bad_json",
    "no_prompt",
    "empty_prompt",
    "bad_token",
    "bad_params",
    "unsupported_param",
    "too_long",
    "tokenize_failed",
    "duplicate_id",
    "engine_failed",
)


class RowError(Exception):
    """One row failed. `code` is one of ROW_ERROR_CODES, `message` tells the user what to change."""

    def __init__(self, code: str, message: str) -> None:
        assert code in ROW_ERROR_CODES, code
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
