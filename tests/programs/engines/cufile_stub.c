/* A `libcufile.so.0` by the documented calls, over ordinary memory.
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
#include <unistd.h>

typedef struct { int err; int cu_err; } CUfileError_t;
typedef struct { int type; union { int fd; void *handle; } handle; const void *fs_ops; } Descr;

static bool compat = true, opened = false;
static unsigned transfers = 0;

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

    unsigned own = __atomic_add_fetch(&transfers, 1, __ATOMIC_SEQ_CST);
    if (fault && sscanf(fault, "%u %d", &number, &status) == 2 && number == own) {
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
