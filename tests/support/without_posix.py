"""A Python that has lost what only POSIX has, for code that a test runs in another process."""

from __future__ import annotations

#: Runs with what only POSIX has taken away, and Windows' way of saying where things are.
HIDE = """
import os, signal, sys
# These have POSIX modules of their own on this system, and others on Windows.
import logging, multiprocessing.context, psutil, subprocess, tempfile
HIDDEN = {"fcntl", "pwd", "grp", "resource", "termios", "pty", "tty", "syslog", "readline"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
for name in HIDDEN:
    sys.modules.pop(name, None)
CALLS = "fork getuid geteuid getgid pwrite pread setsid getsid killpg waitid getloadavg statvfs"
CONSTANTS = "sysconf O_DIRECTORY WIFSIGNALED WNOHANG uname sched_getaffinity mkfifo"
for name in f"{CALLS} {CONSTANTS} register_at_fork".split():
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGHUP", "SIGUSR1", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
"""
