//! As much of CUDA's driver as it takes to have memory of a GPU, loaded at run time.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;

use libloading::{Library, Symbol};

/// A GPU with its primary context, current on the thread that opened it.
pub(in crate::nixl) struct Cuda {
    number: u32,
    name: String,
    context: Context,
    set_current: unsafe extern "C" fn(Context) -> c_int,
    mem_alloc: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    mem_free: unsafe extern "C" fn(u64) -> c_int,
    copy_in: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int,
    copy_out: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int,
    synchronize: unsafe extern "C" fn() -> c_int,
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Context(*mut c_void);

// SAFETY: a context is a name for the driver's own object, which any thread may make current; `Cuda` does before each call.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Cuda {
    /// Opens a GPU by its number.
    pub(in crate::nixl) fn open(number: u32) -> Result<Self, String> {
        // SAFETY: this is the driver's library of the system; its constructors may run on any thread.
        let library = unsafe { Library::new("libcuda.so.1") }
            .map_err(|error| format!("there is no CUDA driver on this machine: {error}"))?;
        // A driver stays loaded as long as there are allocations.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: signatures of the driver API's documentation (the `_v2` names are those of 64-bit sizes).
        unsafe {
            let init: Symbol<'_, unsafe extern "C" fn(u32) -> c_int> =
                symbol(library, b"cuInit\0")?;
            let get: Symbol<'_, unsafe extern "C" fn(*mut c_int, c_int) -> c_int> =
                symbol(library, b"cuDeviceGet\0")?;
            let get_name: Symbol<'_, unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
                symbol(library, b"cuDeviceGetName\0")?;
            let retain: Symbol<'_, unsafe extern "C" fn(*mut Context, c_int) -> c_int> =
                symbol(library, b"cuDevicePrimaryCtxRetain\0")?;
            check("cuInit", init(0))?;
            let ordinal =
                c_int::try_from(number).map_err(|_| format!("no GPU has the number {number}"))?;
            let mut device = 0;
            check("cuDeviceGet", get(&mut device, ordinal))
                .map_err(|error| format!("there is no GPU {number}: {error}"))?;
            let mut name = [0_u8; 128];
            check(
                "cuDeviceGetName",
                get_name(name.as_mut_ptr().cast(), 127, device),
            )?;
            let length = name.iter().position(|byte| *byte == 0).unwrap_or(0);
            let mut context = Context(std::ptr::null_mut());
            check("cuDevicePrimaryCtxRetain", retain(&mut context, device))?;
            let cuda = Self {
                number,
                name: String::from_utf8_lossy(&name[..length]).into_owned(),
                context,
                set_current: *symbol(library, b"cuCtxSetCurrent\0")?,
                mem_alloc: *symbol(library, b"cuMemAlloc_v2\0")?,
                mem_free: *symbol(library, b"cuMemFree_v2\0")?,
                copy_in: *symbol(library, b"cuMemcpyHtoD_v2\0")?,
                copy_out: *symbol(library, b"cuMemcpyDtoH_v2\0")?,
                synchronize: *symbol(library, b"cuCtxSynchronize\0")?,
            };
            cuda.current()?;
            Ok(cuda)
        }
    }

    pub(in crate::nixl) const fn number(&self) -> u32 {
        self.number
    }

    pub(in crate::nixl) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn allocate(&self, length: usize) -> Result<u64, String> {
        self.current()?;
        let mut address = 0;
        // SAFETY: a place for the result, under a current context.
        check("cuMemAlloc", unsafe {
            (self.mem_alloc)(&mut address, length)
        })
        .map_err(|error| {
            format!(
                "cannot allocate {length} bytes of GPU {}: {error}",
                self.number
            )
        })?;
        Ok(address)
    }

    pub(super) fn free(&self, address: u64) {
        if self.current().is_ok() {
            // SAFETY: allocated by `allocate`, freed once.
            unsafe { (self.mem_free)(address) };
        }
    }

    pub(super) fn copy_in(&self, address: u64, bytes: &[u8]) -> Result<(), String> {
        self.current()?;
        // SAFETY: `Memory` has checked that the range is inside its allocation.
        unsafe {
            check(
                "cuMemcpyHtoD",
                (self.copy_in)(address, bytes.as_ptr().cast(), bytes.len()),
            )?;
            check("cuCtxSynchronize", (self.synchronize)())
        }
    }

    pub(super) fn copy_out(&self, address: u64, bytes: &mut [u8]) -> Result<(), String> {
        self.current()?;
        // SAFETY: as in `copy_in`.
        check("cuMemcpyDtoH", unsafe {
            (self.copy_out)(bytes.as_mut_ptr().cast(), address, bytes.len())
        })
    }

    fn current(&self) -> Result<(), String> {
        // SAFETY: the context is retained for the life of the process.
        check("cuCtxSetCurrent", unsafe {
            (self.set_current)(self.context)
        })
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("number", &self.number)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// # Safety
/// `T` must be the type of the function of this name.
unsafe fn symbol<'a, T>(library: &'a Library, name: &[u8]) -> Result<Symbol<'a, T>, String> {
    // SAFETY: the caller's promise.
    unsafe { library.get(name) }.map_err(|error| format!("the CUDA driver is too old: {error}"))
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    match code {
        0 => Ok(()),
        100 => Err(format!("{call}: no GPU is there")),
        code => Err(format!("{call} failed with CUDA's code {code}")),
    }
}
