/* Counts the operations on files below one folder, and at the N-th of them logs, kills, fails, cuts
 * a write short, or pulls the plug of the file system. Preloaded; harmless until faults_arm().
 *
 * The log has a record for each operation that is counted, "nothing" for one that changes nothing:
 * a folder that is there already, a file that is not.
 * One mutex is held around each operation, so that the order of the log is the order on disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, KILL, FAIL, SHORT, TORN, SHUTDOWN };
enum { CHANGE = 1, SYNC = 2, LOOK = 4, GROW = 8, WRITE = 16 }; /* GROW: may need space */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int action, argument, mask, sticky, log_fd = -1, plug_fd = -1;
static long at, count;

/* action at the `n`-th operation of the kinds in `kinds` below `folder`; `last`: and at all after
 * it. `arg`: the errno of FAIL, the flag of SHUTDOWN, whose file system is that of `plug`. */
void faults_arm(const char *folder, int what, long n, int arg, int kinds, int last, int log,
                int plug) {
    pthread_mutex_lock(&mutex);
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    action = what, at = n, argument = arg, mask = kinds, sticky = last;
    log_fd = log, plug_fd = plug, count = 0;
    pthread_mutex_unlock(&mutex);
}

long faults_count(void) { return count; }

static void put(const void *data, size_t size) {
    const char *next = data;
    while (size) {
        long done = syscall(SYS_write, log_fd, next, size);
        if (done <= 0) _exit(97);
        next += done, size -= done;
    }
}

/* A record: header size, data size, "name result inode offset path\0path2" and the data. */
static void record(const char *name, long result, unsigned long inode, long offset,
                   const char *path, const char *path2, const struct iovec *data, int parts,
                   size_t nbytes) {
    char head[3 * PATH_MAX];
    int size = snprintf(head, sizeof head, "%s %ld %lu %ld %s", name, result, inode, offset, path);
    size += 1 + snprintf(head + size + 1, sizeof head - size - 1, "%s", path2 ? path2 : "");
    uint32_t sizes[2] = {size, nbytes};
    put(sizes, sizeof sizes);
    put(head, size);
    for (int i = 0; i < parts && nbytes; i++) {
        size_t part = data[i].iov_len < nbytes ? data[i].iov_len : nbytes;
        put(data[i].iov_base, part);
        nbytes -= part;
    }
}

/* What the program under test has been promised, in order with its operations. */
void faults_note(const char *text) {
    pthread_mutex_lock(&mutex);
    if (log_fd >= 0) record("note", 0, 0, 0, text, NULL, NULL, 0, 0);
    pthread_mutex_unlock(&mutex);
}

static int is_below(const char *path) {
    return root_length && !strncmp(path, root, root_length) &&
           (path[root_length] == '/' || !path[root_length]);
}

static const char *resolve(int folder, const char *path, char *space) {
    char link[64];
    ssize_t size;
    if (!root_length || !path) return "";
    if (*path == '/') return path;
    if (folder == AT_FDCWD) {
        size = readlink("/proc/self/cwd", space, PATH_MAX - 1);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        size = readlink(link, space, PATH_MAX - 1);
    }
    if (size < 0) return "";
    snprintf(space + size, PATH_MAX - size, "/%s", path);
    return space;
}

static const char *path_of(int fd, char *space) {
    char link[64];
    space[0] = 0;
    if (!root_length) return space;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, space, PATH_MAX - 1);
    space[size < 0 ? 0 : size] = 0;
    return space;
}

static unsigned long inode_of(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

static unsigned long inode_of_fd(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static void record_nothing(const char *path) {
    record("nothing", 0, 0, 0, path, NULL, NULL, 0, 0);
}

/* Count an operation. 0: go on; 1: fail, errno is set; 2: write half, then `die` if it is TORN. */
static int gate(int kind) {
    if (!(kind & mask)) return 0;
    long now = ++count;
    if (action == NOTHING || at <= 0 || !(now == at || (sticky && now > at))) return 0;
    switch (action) {
        case FAIL:
            errno = argument;
            return 1;
        case SHORT: return kind & WRITE ? 2 : 0;
        case TORN:
            if (kind & WRITE) return 2;
            break;
        case SHUTDOWN: ioctl(plug_fd, 0x8004587d, &argument); break;
    }
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static void die_if_torn(void) {
    if (action == TORN) {
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
}

#define REAL(type, name, ...)                                  \
    static type (*real)(__VA_ARGS__);                          \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* --- open ----------------------------------------------------------------------------------- */

static int do_open(int (*real)(int, const char *, int, ...), int folder, const char *path,
                   int flags, mode_t mode) {
    char space[PATH_MAX];
    const char *full = resolve(folder, path, space);
    if (!is_below(full)) return real(folder, path, flags, mode);
    pthread_mutex_lock(&mutex);
    int changes = flags & (O_CREAT | O_TRUNC) && inode_of(full) == 0;
    int kind = flags & (O_CREAT | O_TRUNC) ? CHANGE | GROW : LOOK;
    int fd = -1;
    if (!gate(kind)) fd = real(folder, path, flags, mode);
    if (log_fd >= 0 && kind & mask) {
        if (fd >= 0 && (changes || flags & O_TRUNC))
            record(changes ? "create" : "truncate", 0, inode_of_fd(fd), 0, full, NULL, NULL, 0, 0);
        else
            record_nothing(full);
    }
    int saved = errno;
    pthread_mutex_unlock(&mutex);
    errno = saved;
    return fd;
}

#define MODE                              \
    mode_t mode = 0;                      \
    if (flags & (O_CREAT | O_TMPFILE)) {  \
        va_list rest;                     \
        va_start(rest, flags);            \
        mode = va_arg(rest, mode_t);      \
        va_end(rest);                     \
    }

static int real_openat(int folder, const char *path, int flags, ...) {
    MODE
    REAL(int, openat, int, const char *, int, ...);
    return real(folder, path, flags | O_LARGEFILE, mode);
}

int open(const char *path, int flags, ...) {
    MODE
    return do_open(real_openat, AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE
    return do_open(real_openat, AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE
    return do_open(real_openat, folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE
    return do_open(real_openat, folder, path, flags, mode);
}

/* --- write ---------------------------------------------------------------------------------- */

static ssize_t do_write(int fd, const struct iovec *parts, int number, off_t offset) {
    char space[PATH_MAX];
    REAL(ssize_t, writev, int, const struct iovec *, int);
    static ssize_t (*real_at)(int, const struct iovec *, int, off_t);
    if (!real_at) real_at = (ssize_t(*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, "pwritev");
    if (!root_length || !is_below(path_of(fd, space)))
        return offset < 0 ? real(fd, parts, number) : real_at(fd, parts, number, offset);
    pthread_mutex_lock(&mutex);
    ssize_t result = -1;
    off_t start = offset;
    if (offset < 0) start = lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
    int gated = gate(CHANGE | GROW | WRITE);
    if (gated != 1) {
        struct iovec half = parts[0];
        if (gated == 2) {
            half.iov_len = (half.iov_len + 1) / 2;
            parts = &half, number = 1;
        }
        result = offset < 0 ? real(fd, parts, number) : real_at(fd, parts, number, offset);
        if (result > 0 && log_fd >= 0)
            record("write", result, inode_of_fd(fd), start, space, NULL, parts, number, result);
        if (gated == 2) die_if_torn();
    }
    if (result <= 0 && log_fd >= 0) record_nothing(space);
    int saved = errno;
    pthread_mutex_unlock(&mutex);
    errno = saved;
    return result;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!root_length) return syscall(SYS_write, fd, data, size);
    struct iovec part = {(void *)data, size};
    return do_write(fd, &part, 1, -1);
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
    return do_write(fd, parts, number, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec part = {(void *)data, size};
    return do_write(fd, &part, 1, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    return pwrite(fd, data, size, offset);
}
ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t offset) {
    return do_write(fd, parts, number, offset);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int number, off_t offset) {
    return do_write(fd, parts, number, offset);
}

/* --- all others ----------------------------------------------------------------------------- */

/* CALL runs between the gate and the log; INODE is looked up before it, or after it if there is
 * none before. */
#define OPERATION(KIND, NAME, INODE, FULL, FULL2, CALL)                             \
    if (!is_below(FULL)) return CALL;                                               \
    pthread_mutex_lock(&mutex);                                                     \
    int result = -1;                                                                \
    unsigned long inode = INODE;                                                    \
    if (!gate(KIND)) {                                                              \
        result = CALL;                                                              \
        if (!inode) inode = INODE;                                                  \
    }                                                                               \
    if (log_fd >= 0) {                                                              \
        if (!result) record(NAME, 0, inode, 0, FULL, FULL2, NULL, 0, 0);            \
        else record_nothing(FULL);                                                  \
    }                                                                               \
    int saved = errno;                                                              \
    pthread_mutex_unlock(&mutex);                                                   \
    errno = saved;                                                                  \
    return result

int fsync(int fd) {
    char space[PATH_MAX];
    REAL(int, fsync, int);
    path_of(fd, space);
    OPERATION(SYNC, "fsync", inode_of_fd(fd), space, NULL, real(fd));
}
int fdatasync(int fd) {
    char space[PATH_MAX];
    REAL(int, fdatasync, int);
    path_of(fd, space);
    OPERATION(SYNC, "fsync", inode_of_fd(fd), space, NULL, real(fd));
}
int ftruncate(int fd, off_t size) {
    char space[PATH_MAX];
    REAL(int, ftruncate, int, off_t);
    path_of(fd, space);
    OPERATION(CHANGE, "ftruncate", inode_of_fd(fd), space, NULL, real(fd, size));
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    char space[PATH_MAX], space2[PATH_MAX];
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    const char *full = resolve(from, old, space), *full2 = resolve(to, new, space2);
    OPERATION(CHANGE, "rename", inode_of(full), full, full2, real(from, old, to, new, flags));
}
int renameat(int from, const char *old, int to, const char *new) {
    return renameat2(from, old, to, new, 0);
}
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    char space[PATH_MAX], space2[PATH_MAX];
    REAL(int, linkat, int, const char *, int, const char *, int);
    const char *full = resolve(from, old, space), *full2 = resolve(to, new, space2);
    OPERATION(CHANGE | GROW, "link", inode_of(full), full, full2, real(from, old, to, new, flags));
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char *path, int flags) {
    char space[PATH_MAX];
    REAL(int, unlinkat, int, const char *, int);
    const char *full = resolve(folder, path, space);
    OPERATION(CHANGE, "unlink", inode_of(full), full, NULL, real(folder, path, flags));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    char space[PATH_MAX];
    REAL(int, mkdirat, int, const char *, mode_t);
    const char *full = resolve(folder, path, space);
    OPERATION(CHANGE | GROW, "mkdir", inode_of(full), full, NULL, real(folder, path, mode));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
