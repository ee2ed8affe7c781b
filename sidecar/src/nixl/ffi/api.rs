//! The symbols of `libnixl_capi.so` that are used, resolved together.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

/// A pointer to one of NIXL's own objects.
pub(super) type Handle = *mut c_void;

/// Declares the table of functions: each has C linkage, returns a status, and must be there.
macro_rules! table {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions of the C API. The library stays loaded for the life of the process.
        #[derive(Debug)]
        pub(in crate::nixl) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Api {
            fn resolve(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the function of this name in NIXL's public header, which every
                        // release since 0.7 keeps; the pointer outlives the borrow since the library is never unloaded.
                        let found = unsafe { library.get(concat!("nixl_capi_", stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|_| concat!("nixl_capi_", stringify!($name)).to_owned())?
                    },)*
                })
            }
        }
    };
}

table! {
    create_agent(*const c_char, *mut Handle);
    destroy_agent(Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    get_available_plugins(Handle, *mut Handle);
    destroy_string_list(Handle);
    string_list_size(Handle, *mut usize);
    string_list_get(Handle, usize, *mut *const c_char);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    create_opt_args(*mut Handle);
    destroy_opt_args(Handle);
    opt_args_add_backend(Handle, Handle);
    opt_args_set_notif_msg(Handle, *const c_void, usize);
    opt_args_set_has_notif(Handle, bool);
    create_reg_dlist(c_int, *mut Handle);
    destroy_reg_dlist(Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    register_mem(Handle, Handle, Handle);
    create_xfer_dlist(c_int, *mut Handle);
    destroy_xfer_dlist(Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
    create_notif_map(*mut Handle);
    destroy_notif_map(Handle);
    get_notifs(Handle, Handle, Handle);
    notif_map_size(Handle, *mut usize);
    notif_map_get_agent_at(Handle, usize, *mut *const c_char);
    notif_map_get_notifs_size(Handle, *const c_char, *mut usize);
    notif_map_get_notif(Handle, *const c_char, usize, *mut *const c_void, *mut usize);
}

impl Api {
    /// Loads the library and resolves every symbol, or says what is wrong with it.
    pub(in crate::nixl) fn load(path: &Path) -> Result<Self, String> {
        // SAFETY: loading runs the library's constructors. The path is the operator's, or that of an installed NIXL, and the
        // caller has made sure that those constructors' counterparts do not crash at exit (see `environment`).
        let library = unsafe { Library::new(path) }
            .map_err(|error| format!("cannot load {}: {error}", path.display()))?;
        let api = Self::resolve(&library).map_err(|symbol| {
            format!(
                "{} lacks the symbol {symbol}: it is no NIXL, or an older one than 0.7",
                path.display()
            )
        });
        // SAFETY: the type is that of the header; the function reads a constant.
        let stub = unsafe { library.get::<unsafe extern "C" fn() -> bool>(b"nixl_capi_is_stub\0") }
            .is_ok_and(|is_stub| unsafe { is_stub() });
        // Never unloaded, loaded in vain or not: threads and exit handlers of UCX refer to it.
        std::mem::forget(library);
        if stub && api.is_ok() {
            return Err(format!(
                "{} is the stub library without NIXL in it",
                path.display()
            ));
        }
        api
    }
}

unsafe extern "C" {
    /// Frees what the C API allocated for its caller.
    pub(super) fn free(memory: *mut c_void);
}
