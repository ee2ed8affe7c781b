//! NIXL's objects as owned values.

use std::ffi::{CStr, CString, c_int};
use std::ops::Range;
use std::ptr;
use std::slice;

use super::Memory;
use super::api::{Api, Handle, free};
use crate::nixl::Error;

/// What a transfer has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::nixl) enum Status {
    Running,
    Done,
}

/// Memory kinds of the C API.
const DRAM: c_int = 0;
const VRAM: c_int = 1;
/// Status of the C API for what is not over.
const IN_PROGRESS: c_int = 1;

/// An agent with one backend. Not `Send`: it stays on the thread that made it.
#[derive(Debug)]
pub(in crate::nixl) struct Agent {
    api: &'static Api,
    raw: Handle,
    backend: Handle,
    /// Options that name the backend.
    options: Handle,
}

impl Agent {
    /// Creates an agent and its backend.
    pub(in crate::nixl) fn new(
        api: &'static Api,
        name: &str,
        backend: &str,
        parameters: &[(String, String)],
    ) -> Result<Self, Error> {
        let (name, plugin) = (text(name)?, text(backend)?);
        let mut agent = Self {
            api,
            raw: ptr::null_mut(),
            backend: ptr::null_mut(),
            options: ptr::null_mut(),
        };
        // SAFETY: a terminated string and a place for the result.
        check("create_agent", unsafe {
            (api.create_agent)(name.as_ptr(), &mut agent.raw)
        })?;
        let mut list = ptr::null_mut();
        // SAFETY: a place for the result.
        check("create_params", unsafe { (api.create_params)(&mut list) })?;
        let created = agent.create_backend(&plugin, list, parameters);
        // SAFETY: made above, not used after.
        unsafe { (api.destroy_params)(list) };
        created?;
        // SAFETY: a place for the result, then handles of this API that live.
        unsafe {
            check("create_opt_args", (api.create_opt_args)(&mut agent.options))?;
            check(
                "opt_args_add_backend",
                (api.opt_args_add_backend)(agent.options, agent.backend),
            )?;
        }
        Ok(agent)
    }

    fn create_backend(
        &mut self,
        plugin: &CStr,
        list: Handle,
        parameters: &[(String, String)],
    ) -> Result<(), Error> {
        for (key, value) in parameters {
            let (key, value) = (text(key)?, text(value)?);
            // SAFETY: a live list and terminated strings, which are copied.
            let added = unsafe { (self.api.params_add)(list, key.as_ptr(), value.as_ptr()) };
            check("params_add", added)?;
        }
        let created = unsafe {
            // SAFETY: live handles, a terminated string, a place for the result.
            (self.api.create_backend)(self.raw, plugin.as_ptr(), list, &mut self.backend)
        };
        check("create_backend", created)
    }

    /// Returns the names of the backends that this installation has.
    pub(in crate::nixl) fn plugins(&self) -> Result<Vec<String>, Error> {
        let mut list = ptr::null_mut();
        // SAFETY: a live agent and a place for the result.
        check("get_available_plugins", unsafe {
            (self.api.get_available_plugins)(self.raw, &mut list)
        })?;
        let mut names = Vec::new();
        let mut count = 0;
        // SAFETY: a live list; the strings belong to it and are copied before it is destroyed.
        unsafe {
            if (self.api.string_list_size)(list, &mut count) == 0 {
                for at in 0..count {
                    let mut name = ptr::null();
                    if (self.api.string_list_get)(list, at, &mut name) == 0 && !name.is_null() {
                        names.push(CStr::from_ptr(name).to_string_lossy().into_owned());
                    }
                }
            }
            (self.api.destroy_string_list)(list);
        }
        Ok(names)
    }

    /// Makes memory reachable. The caller keeps it until this agent is gone.
    pub(in crate::nixl) fn register(&self, memory: &Memory) -> Result<(), Error> {
        let mut list = ptr::null_mut();
        // SAFETY: a place for the result.
        check("create_reg_dlist", unsafe {
            (self.api.create_reg_dlist)(kind(memory), &mut list)
        })?;
        let (address, device) = (address(memory.address())?, device(memory));
        // SAFETY: live handles; the described memory is allocated; no metadata is given.
        unsafe {
            let added =
                (self.api.reg_dlist_add_desc)(list, address, memory.len(), device, ptr::null(), 0);
            let registered = check("reg_dlist_add_desc", added).and_then(|()| {
                check(
                    "register_mem",
                    (self.api.register_mem)(self.raw, list, self.options),
                )
            });
            (self.api.destroy_reg_dlist)(list);
            registered
        }
    }

    /// Returns what peers need to reach this agent and its memory.
    pub(in crate::nixl) fn metadata(&self) -> Result<Vec<u8>, Error> {
        let (mut data, mut length) = (ptr::null_mut(), 0);
        // SAFETY: a live agent and places for the results.
        check("get_local_md", unsafe {
            (self.api.get_local_md)(self.raw, &mut data, &mut length)
        })?;
        if data.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: on success `data` is a copy of `length` bytes made for the caller, who frees it.
        unsafe {
            let bytes = slice::from_raw_parts(data.cast::<u8>(), length).to_vec();
            free(data);
            Ok(bytes)
        }
    }

    /// Takes in a peer's metadata; returns the peer's name.
    pub(in crate::nixl) fn load_remote(&self, metadata: &[u8]) -> Result<String, Error> {
        let mut name = ptr::null_mut();
        // SAFETY: a live agent, bytes that are copied, a place for the result.
        let loaded = unsafe {
            (self.api.load_remote_md)(
                self.raw,
                metadata.as_ptr().cast(),
                metadata.len(),
                &mut name,
            )
        };
        check("load_remote_md", loaded)?;
        if name.is_null() {
            return Ok(String::new());
        }
        // SAFETY: on success `name` is a terminated copy made for the caller, who frees it.
        unsafe {
            let text = CStr::from_ptr(name).to_string_lossy().into_owned();
            free(name.cast());
            Ok(text)
        }
    }

    /// Forgets a peer.
    pub(in crate::nixl) fn forget_remote(&self, name: &str) -> Result<(), Error> {
        let name = text(name)?;
        // SAFETY: a live agent and a terminated string.
        check("invalidate_remote_md", unsafe {
            (self.api.invalidate_remote_md)(self.raw, name.as_ptr())
        })
    }

    /// Prepares a transfer between as many local parts as remote ones, of equal lengths. The local memory must live until
    /// the request is over.
    pub(in crate::nixl) fn request(
        &self,
        write: bool,
        local: &List,
        remote: &List,
        peer: &str,
        notification: Option<&[u8]>,
    ) -> Result<Request, Error> {
        let peer = text(peer)?;
        let mut options = ptr::null_mut();
        // SAFETY: a place for the result.
        check("create_opt_args", unsafe {
            (self.api.create_opt_args)(&mut options)
        })?;
        let mut raw = ptr::null_mut();
        // SAFETY: live handles; the message is copied; the lists are copied into the request.
        let created = unsafe {
            let mut prepared = check(
                "opt_args_add_backend",
                (self.api.opt_args_add_backend)(options, self.backend),
            );
            if let (Ok(()), Some(message)) = (&prepared, notification) {
                prepared = check(
                    "opt_args_set_has_notif",
                    (self.api.opt_args_set_has_notif)(options, true),
                )
                .and_then(|()| {
                    let set = (self.api.opt_args_set_notif_msg)(
                        options,
                        message.as_ptr().cast(),
                        message.len(),
                    );
                    check("opt_args_set_notif_msg", set)
                });
            }
            let created = prepared.and_then(|()| {
                let operation = c_int::from(write);
                let created = (self.api.create_xfer_req)(
                    self.raw,
                    operation,
                    local.raw,
                    remote.raw,
                    peer.as_ptr(),
                    &mut raw,
                    options,
                );
                check("create_xfer_req", created)
            });
            (self.api.destroy_opt_args)(options);
            created
        };
        created.map(|()| Request { api: self.api, raw })
    }

    /// Begins a transfer.
    pub(in crate::nixl) fn post(&self, request: &Request) -> Result<Status, Error> {
        // SAFETY: live handles; no options.
        status("post_xfer_req", unsafe {
            (self.api.post_xfer_req)(self.raw, request.raw, ptr::null_mut())
        })
    }

    /// Asks how far it is.
    pub(in crate::nixl) fn poll(&self, request: &Request) -> Result<Status, Error> {
        // SAFETY: live handles.
        status("get_xfer_status", unsafe {
            (self.api.get_xfer_status)(self.raw, request.raw)
        })
    }

    /// Gives back a request that is over. One that NIXL will not let go of is leaked.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "nobody may use it afterwards"
    )]
    pub(in crate::nixl) fn release(&self, request: Request) {
        // SAFETY: live handles; a request is released once, and destroyed only then.
        unsafe {
            if (self.api.release_xfer_req)(self.raw, request.raw) == 0 {
                (self.api.destroy_xfer_req)(request.raw);
            }
        }
    }

    /// Returns the notifications that came, with who sent them.
    pub(in crate::nixl) fn notifications(&self) -> Result<Vec<(String, Vec<u8>)>, Error> {
        let mut map = ptr::null_mut();
        // SAFETY: a place for the result.
        check("create_notif_map", unsafe {
            (self.api.create_notif_map)(&mut map)
        })?;
        let mut came = Vec::new();
        // SAFETY: live handles; names and messages belong to the map and are copied before it is destroyed.
        let read = unsafe {
            let read = check(
                "get_notifs",
                (self.api.get_notifs)(self.raw, map, ptr::null_mut()),
            );
            let mut agents = 0;
            if read.is_ok() && (self.api.notif_map_size)(map, &mut agents) == 0 {
                for at in 0..agents {
                    let mut name = ptr::null();
                    if (self.api.notif_map_get_agent_at)(map, at, &mut name) != 0 || name.is_null()
                    {
                        continue;
                    }
                    let from = CStr::from_ptr(name).to_string_lossy().into_owned();
                    let mut count = 0;
                    (self.api.notif_map_get_notifs_size)(map, name, &mut count);
                    for number in 0..count {
                        let (mut data, mut length) = (ptr::null(), 0);
                        let got = (self.api.notif_map_get_notif)(
                            map,
                            name,
                            number,
                            &mut data,
                            &mut length,
                        );
                        if got == 0 && !data.is_null() {
                            let bytes = slice::from_raw_parts(data.cast::<u8>(), length);
                            came.push((from.clone(), bytes.to_vec()));
                        }
                    }
                }
            }
            (self.api.destroy_notif_map)(map);
            read
        };
        read.map(|()| came)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; the wrapper of the backend is not the backend, which the agent owns.
        unsafe {
            if !self.options.is_null() {
                (self.api.destroy_opt_args)(self.options);
            }
            if !self.raw.is_null() {
                (self.api.destroy_agent)(self.raw);
            }
            if !self.backend.is_null() {
                (self.api.destroy_backend)(self.backend);
            }
        }
    }
}

/// Descriptors of a transfer's one side.
#[derive(Debug)]
pub(in crate::nixl) struct List {
    api: &'static Api,
    raw: Handle,
}

impl List {
    /// Lists parts of a memory, or of a peer's, by address.
    pub(in crate::nixl) fn new(
        api: &'static Api,
        gpu: Option<u32>,
        parts: impl Iterator<Item = Range<u64>>,
    ) -> Result<Self, Error> {
        let mut list = Self {
            api,
            raw: ptr::null_mut(),
        };
        let kind = if gpu.is_some() { VRAM } else { DRAM };
        // SAFETY: a place for the result.
        check("create_xfer_dlist", unsafe {
            (api.create_xfer_dlist)(kind, &mut list.raw)
        })?;
        let device = u64::from(gpu.unwrap_or(0));
        for part in parts {
            let (start, length) = (address(part.start)?, address(part.end - part.start)?);
            // SAFETY: a live list; addresses are only written down here.
            let added = unsafe { (api.xfer_dlist_add_desc)(list.raw, start, length, device) };
            check("xfer_dlist_add_desc", added)?;
        }
        Ok(list)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made in `new`, destroyed once.
            unsafe { (self.api.destroy_xfer_dlist)(self.raw) };
        }
    }
}

/// A prepared transfer, given back with [`Agent::release`]; dropped without, it is leaked rather than freed under NIXL.
#[derive(Debug)]
pub(in crate::nixl) struct Request {
    #[expect(dead_code, reason = "the table must outlive the request")]
    api: &'static Api,
    raw: Handle,
}

fn kind(memory: &Memory) -> c_int {
    if memory.gpu_number().is_some() {
        VRAM
    } else {
        DRAM
    }
}

fn device(memory: &Memory) -> u64 {
    u64::from(memory.gpu_number().unwrap_or(0))
}

fn address(value: u64) -> Result<usize, Error> {
    usize::try_from(value).map_err(|_| {
        Error::Refused(format!(
            "the address {value} has more bits than this machine's"
        ))
    })
}

fn text(value: &str) -> Result<CString, Error> {
    CString::new(value).map_err(|_| Error::Refused(format!("{value:?} has a zero byte in it")))
}

fn check(call: &'static str, code: c_int) -> Result<(), Error> {
    if code == 0 {
        Ok(())
    } else {
        Err(Error::Failed { call, code })
    }
}

fn status(call: &'static str, code: c_int) -> Result<Status, Error> {
    match code {
        0 => Ok(Status::Done),
        IN_PROGRESS => Ok(Status::Running),
        code => Err(Error::Failed { call, code }),
    }
}
