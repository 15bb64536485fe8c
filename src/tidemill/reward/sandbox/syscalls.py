"""System calls a sandboxed program may make, by name, with their numbers on x86_64 and aarch64 (None: not there).

Everything else is refused, which leaves out: new processes, other programs, sockets, ptrace, signals to others, mounts,
changes of owner, mode or time (Landlock does not guard those), and whatever a later kernel brings.
"""

from __future__ import annotations

# fmt: off
PLAIN: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "open": (2, None), "openat": (257, 56), "close": (3, 57), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "lseek": (8, 62),
    "access": (21, None), "faccessat": (269, 48), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "pipe": (22, None), "pipe2": (293, 59), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getpgrp": (111, None), "getrandom": (318, 278),
    "getrusage": (98, 165), "times": (100, 153), "uname": (63, 160), "sysinfo": (99, 179), "umask": (95, 166),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "futex": (202, 98), "set_robust_list": (273, 99),
    "rseq": (334, 293), "set_tid_address": (218, 96), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "get_robust_list": (274, 100), "membarrier": (324, 283), "exit": (60, 93), "exit_group": (231, 94),
    "restart_syscall": (219, 128), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "symlink": (88, None), "symlinkat": (266, 36),
    "ftruncate": (77, 46), "fsync": (74, 82), "fdatasync": (75, 83), "fallocate": (285, 47), "wait4": (61, 260),
    "waitid": (247, 95), "arch_prctl": (158, None), "getrlimit": (97, 163),
}
# fmt: on

# Allowed only with some arguments: see filter.py.
CLONE = (56, 220)
IOCTL = (16, 29)
FCNTL = (72, 25)
PRLIMIT64 = (302, 261)
TGKILL = (234, 131)

# Refused with "not implemented", so that the C library falls back to an older call that is filtered.
NOT_IMPLEMENTED = {"clone3": (435, 435), "faccessat2": (439, 439), "openat2": (437, 437)}

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH value
