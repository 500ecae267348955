"""Makes the modules `os` and `signal` of this process behave as they do on Windows.

Names that Windows lacks are gone, `dir_fd` is refused, a folder cannot be opened, an open file can
neither be renamed nor removed, and a file opened for reading cannot be made durable. This is for a
process of its own: import the third-party libraries first, then call `act_as_windows`.
"""

import builtins
import ctypes
import os
import signal
import stat
import sys
from collections.abc import Callable
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The public names of Python 3.11 to 3.13 on Windows, from the stubs of typeshed, and `_exit`.
OS = _names(
    """
    _exit DirEntry EX_OK F_OK O_APPEND O_BINARY O_CREAT O_EXCL O_NOINHERIT O_RANDOM O_RDONLY O_RDWR
    O_SEQUENTIAL O_SHORT_LIVED O_TEMPORARY O_TEXT O_TRUNC O_WRONLY P_DETACH P_NOWAIT P_NOWAITO
    P_OVERLAY P_WAIT PathLike R_OK SEEK_CUR SEEK_END SEEK_SET TMP_MAX W_OK X_OK abort access
    add_dll_directory altsep chdir chmod close closerange cpu_count curdir defpath
    device_encoding devnull dup dup2 environ error execl execle execlp execlpe execv execve
    execvp execvpe extsep fdopen fsdecode fsencode fspath fstat fsync ftruncate get_exec_path
    get_handle_inheritable get_inheritable get_terminal_size getcwd getcwdb getenv getlogin
    getpid getppid isatty kill linesep link listdir lseek lstat makedirs mkdir name open pardir
    path pathsep pipe popen putenv read readlink remove removedirs rename renames replace rmdir
    scandir sep set_handle_inheritable set_inheritable spawnl spawnle spawnv spawnve startfile
    stat stat_result statvfs_result strerror supports_bytes_environ supports_dir_fd
    supports_effective_ids supports_fd supports_follow_symlinks symlink system terminal_size
    times times_result truncate umask uname_result unlink unsetenv urandom utime waitpid
    waitstatus_to_exitcode walk write
    """
)
SIGNAL = _names(
    """
    CTRL_BREAK_EVENT CTRL_C_EVENT Handlers NSIG SIGABRT SIGBREAK SIGFPE SIGILL SIGINT SIGSEGV
    SIGTERM SIG_DFL SIG_IGN Signals default_int_handler getsignal raise_signal set_wakeup_fd
    signal strsignal valid_signals
    """
)
# Modules of the standard library that Windows lacks.
MODULES = _names("curses fcntl grp posix pty pwd readline resource syslog termios tty")
_BINARY = 1 << 30


def act_as_windows() -> None:
    """Changes this process for good."""
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, known in ((os, OS), (signal, SIGNAL)):
        for name in set(dir(module)) - known:
            if not name.startswith("_") and not isinstance(getattr(module, name), type(os)):
                delattr(module, name)
    changed: Any = os
    changed.O_BINARY = _BINARY
    changed.supports_dir_fd = changed.supports_fd = frozenset[Callable[..., Any]]()
    for name in ("rename", "replace", "unlink", "remove"):
        setattr(os, name, _of_closed_files(getattr(os, name), replaces=name != "rename"))
    changed.open, changed.fsync = _open(os.open), _fsync(os.fsync)
    for name in ("stat", "lstat", "open", "unlink", "remove", "mkdir", "rmdir", "readlink", "link"):
        setattr(os, name, _without_dir_fd(getattr(os, name)))
    loads = ctypes.CDLL.__init__

    def load(self: Any, name: str, *arguments: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        loads(self, name, *arguments, **options)

    ctypes.CDLL.__init__ = load  # type: ignore[method-assign,assignment]


def _without_dir_fd(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any, **options: Any) -> Any:
        if any(options.pop(name, None) is not None for name in ("dir_fd", "src_dir_fd")):
            raise NotImplementedError("dir_fd unavailable on this platform")
        return call(*arguments, **options)

    return checked


def _is_open(path: Any) -> bool:
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.path.samestat(os.fstat(int(fd)), os.lstat(path)):
                return True
        except OSError:
            continue
    return False


def _of_closed_files(call: Callable[..., Any], replaces: bool) -> Callable[..., Any]:
    def checked(*paths: Any) -> Any:
        for path in paths:
            if _is_open(path) and not os.path.isdir(path):
                raise PermissionError(13, "is being used by another process", path)
        if not replaces and os.path.lexists(paths[-1]):
            raise FileExistsError(17, "cannot create a file when that file exists", paths[-1])
        return call(*paths)

    return checked


def _open(call: Callable[..., int]) -> Callable[..., int]:
    def checked(path: Any, flags: int, mode: int = 0o777) -> int:
        assert flags & _BINARY, f"{path} is opened as text"
        fd = call(path, flags & ~_BINARY, mode)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise PermissionError(13, "Permission denied", path)
        return fd

    return checked


def _fsync(call: Callable[[int], None]) -> Callable[[int], None]:
    def checked(fd: int) -> None:
        with builtins.open(f"/proc/self/fdinfo/{fd}") as file:
            flags = next(line.split()[1] for line in file if line.startswith("flags"))
        if int(flags, 8) & 3 == 0:
            raise OSError(9, "Bad file descriptor")
        call(fd)

    return checked
