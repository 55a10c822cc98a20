/* Loaded before libc (LD_PRELOAD): lets renames fail, and the clock of the day jump. Does nothing until it is told to. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

static char folder[4096];
static long renames, failing = -1;
static int error_number, done_anyway;
static unsigned long clock_state;

/* Counts renames into files below `path` from now on. */
void mishap_watch(const char *path)
{
    strncpy(folder, path, sizeof folder - 1);
    renames = 0;
}

long mishap_renames(void)
{
    return renames;
}

/* Rename `number`, counted from 0, fails with `error`. If `done` it happens nevertheless: the server of a network file
 * system did it, and its answer was lost. */
void mishap_fail_rename(long number, int error, int done)
{
    failing = number;
    error_number = error;
    done_anyway = done;
}

/* The clock of the day jumps at random from now on. */
void mishap_jump(unsigned long seed)
{
    clock_state = seed | 1;
}

static int strikes(const char *target)
{
    return *folder && !strncmp(target, folder, strlen(folder)) && renames++ == failing;
}

#define RENAME(NAME, PARAMETERS, ARGUMENTS)                          \
    int NAME PARAMETERS                                              \
    {                                                                \
        static int(*next) PARAMETERS;                                \
        if (!next)                                                   \
            *(void **)&next = dlsym(RTLD_NEXT, #NAME);               \
        int struck = strikes(target);                                \
        int result = struck && !done_anyway ? 0 : next ARGUMENTS;    \
        if (!struck || result)                                       \
            return result;                                           \
        errno = error_number;                                        \
        return -1;                                                   \
    }

RENAME(rename, (const char *source, const char *target), (source, target))
RENAME(renameat, (int from, const char *source, int to, const char *target), (from, source, to, target))
RENAME(renameat2, (int from, const char *source, int to, const char *target, unsigned int flags),
       (from, source, to, target, flags))
RENAME(link, (const char *source, const char *target), (source, target))

/* Seconds by which the clock is wrong at this moment: none, a second, an hour, a day or twenty years, to either side. */
static time_t wrong_by(void)
{
    static const time_t seconds[] = {0, 1, 3600, 86400, 20L * 365 * 86400};
    if (!clock_state)
        return 0;
    unsigned long state = __atomic_load_n(&clock_state, __ATOMIC_RELAXED);
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    __atomic_store_n(&clock_state, state, __ATOMIC_RELAXED);
    return seconds[state % 5] * (state & 1024 ? 1 : -1);
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    static int (*next)(clockid_t, struct timespec *);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(id, now);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += wrong_by();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    static int (*next)(struct timeval *restrict, void *restrict);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "gettimeofday");
    int result = next(now, zone);
    if (!result)
        now->tv_sec += wrong_by();
    return result;
}

time_t time(time_t *now)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now)
        *now = found.tv_sec;
    return found.tv_sec;
}
