/* Adds an offset to what a process reads as wall-clock time, while it runs (LD_PRELOAD).
 *
 * The offset, whole seconds as a native int64, is the content of the file CLOCK_OFFSET_FILE, which
 * is mapped: another process changes it at any time, as a step of the system clock would. Other
 * clocks are left alone. Deadlines in wall-clock time are given to the kernel without the offset.
 *
 * System calls are made directly: jemalloc, which redis-server is linked with, reads the clock
 * before functions of the C library can be looked up.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* No machine is up for so many seconds, and no wall clock shows fewer. */
#define EARLIEST 1000000000

static const volatile int64_t no_offset;
static const volatile int64_t *offset_s = &no_offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) offset_s = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed && now) now->tv_sec += *offset_s;
    return failed;
}

time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    /* Conditions made for the monotonic clock come here too. */
    if (until->tv_sec < EARLIEST)
        return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
    struct timespec real = {until->tv_sec - *offset_s, until->tv_nsec};
    return pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec real = {until->tv_sec - *offset_s, until->tv_nsec};
    return sem_clockwait(semaphore, CLOCK_REALTIME, &real);
}
