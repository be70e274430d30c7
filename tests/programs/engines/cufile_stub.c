/* A `libcufile.so.0` by the documented calls, over ordinary memory: what is queued is done at once.
 *
 * CUFILE_STUB_FAULT="N STATUS": the Nth transfer moves nothing and ends with that status; -1 is EIO.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef struct { int err; int cu_err; } CUfileError_t;
typedef struct { int type; union { int fd; void *handle; } handle; const void *fs_ops; } Descr;
typedef struct {
    int mode;
    union {
        struct { void *base; off_t file_offset; off_t offset; size_t size; } batch;
    } u;
    void *fh;
    int opcode;
    void *cookie;
} Params;
typedef struct { void *cookie; int status; size_t ret; } Event;

static bool compat = true, opened = false;
static Event events[128];
static unsigned waiting = 0, transfers = 0;

static CUfileError_t said(int status)
{
    return (CUfileError_t){status, 0};
}

static ssize_t move(bool write, void *fh, char *memory, size_t size, off_t at)
{
    const char *fault = getenv("CUFILE_STUB_FAULT");
    unsigned number = 0;
    int status = 0;
    int fd = (int)(size_t)fh - 1;
    size_t done = 0;

    transfers++;
    if (fault && sscanf(fault, "%u %d", &number, &status) == 2 && number == transfers) {
        errno = EIO;
        return status;
    }
    while (done < size) {
        ssize_t moved = write ? pwrite(fd, memory + done, size - done, at + (off_t)done)
                              : pread(fd, memory + done, size - done, at + (off_t)done);
        if (moved <= 0)
            return moved < 0 ? -1 : (ssize_t)done;
        done += (size_t)moved;
    }
    return (ssize_t)done;
}

CUfileError_t cuFileDriverOpen(void) { opened = true; return said(compat ? 5001 : 0); }
CUfileError_t cuFileDriverClose_v2(void) { return said(0); }
long cuFileUseCount(void) { return opened; }
CUfileError_t cuFileGetVersion(int *version) { *version = 99990; return said(0); }
const char *cufileop_status_error(int status) { return status == 5008 ? "not supported" : "other"; }

CUfileError_t cuFileSetParameterBool(int parameter, bool value)
{
    if (opened)
        return said(5026);
    if (parameter == 1)
        compat = value;
    return said(0);
}

CUfileError_t cuFileGetParameterBool(int parameter, bool *value)
{
    *value = parameter == 1 && compat;
    return said(0);
}

CUfileError_t cuFileGetParameterSizeT(int parameter, size_t *value)
{
    *value = parameter == 9 ? 16 : 8; /* PROPERTIES_IO_BATCHSIZE; PER_BUFFER_CACHE_SIZE_KB */
    return said(0);
}

CUfileError_t cuFileHandleRegister(void **fh, Descr *descr)
{
    int flags = fcntl(descr->handle.fd, F_GETFL);

    if (descr->type != 1 || descr->fs_ops || !(flags & O_DIRECT) || (flags & O_ASYNC))
        return said(5019);
    *fh = (void *)(size_t)(descr->handle.fd + 1);
    return said(0);
}

void cuFileHandleDeregister(void *fh) { (void)fh; }

CUfileError_t cuFileBufRegister(const void *base, size_t length, int flags)
{
    return said((size_t)base % 4096 || length % 4096 || flags ? 5022 : 0);
}

CUfileError_t cuFileBufDeregister(const void *base) { return said(base ? 0 : 5022); }

ssize_t cuFileRead(void *fh, void *base, size_t size, off_t at, off_t start)
{
    return move(false, fh, (char *)base + start, size, at);
}

ssize_t cuFileWrite(void *fh, const void *base, size_t size, off_t at, off_t start)
{
    return move(true, fh, (char *)base + start, size, at);
}

CUfileError_t cuFileReadAsync(
    void *fh, void *base, size_t *size, off_t *at, off_t *start, ssize_t *moved, void *stream)
{
    *moved = move(false, fh, (char *)base + *start, *size, *at);
    return said(stream ? 0 : 5022);
}

CUfileError_t cuFileWriteAsync(
    void *fh, void *base, size_t *size, off_t *at, off_t *start, ssize_t *moved, void *stream)
{
    *moved = move(true, fh, (char *)base + *start, *size, *at);
    return said(stream ? 0 : 5022);
}

CUfileError_t cuFileBatchIOSetUp(void **batch, unsigned most)
{
    *batch = events;
    return said(most > 16 ? 5022 : 0);
}

CUfileError_t cuFileBatchIOSubmit(void *batch, unsigned count, Params *params, unsigned flags)
{
    if (batch != events || flags || count + waiting > 16)
        return said(5037);
    for (unsigned i = 0; i < count; i++) {
        Params *one = params + i;
        char *memory = (char *)one->u.batch.base + one->u.batch.offset;
        ssize_t moved = move(one->opcode == 1, one->fh, memory, one->u.batch.size,
                             one->u.batch.file_offset);
        if (one->mode != 1 || one->u.batch.size > 8192)
            return said(5049);
        events[waiting++] = (Event){one->cookie, moved < 0 ? 0x40 : 0x10, (size_t)moved};
    }
    return said(0);
}

CUfileError_t cuFileBatchIOGetStatus(
    void *batch, unsigned least, unsigned *count, Event *found, struct timespec *timeout)
{
    unsigned most = *count;

    if (batch != events || least > most || !timeout || timeout->tv_nsec)
        return said(5022);
    for (*count = 0; *count < most && waiting; (*count)++)
        found[*count] = events[--waiting];
    return said(0);
}

void cuFileBatchIODestroy(void *batch) { (void)batch; }
