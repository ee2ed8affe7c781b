//! Memory that NIXL moves: of the host, page-aligned and zero at first, or of a GPU.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::cuda::Cuda;

/// A block of memory of a fixed size. Peers may read and write it while it is registered, so it is only copied, never lent.
pub struct Memory {
    place: Place,
    length: usize,
}

enum Place {
    Host {
        allocated: NonNull<u8>,
        start: NonNull<u8>,
    },
    Gpu {
        address: u64,
        cuda: Arc<Cuda>,
    },
}

// SAFETY: the memory is owned by this value alone. What may happen at once are copies of plain bytes by peers, by NIXL's
// threads and by `write` and `read`; none of them makes a reference, and torn bytes are what checksums are there for.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

const PAGE: usize = 4096;

impl Memory {
    /// Allocates memory of the host. Pages are taken from the system as they are first written.
    ///
    /// # Errors
    /// Says how much could not be allocated.
    pub fn host(length: usize) -> Result<Self, String> {
        let refused = || format!("cannot allocate {length} bytes");
        let layout = layout(length).ok_or_else(refused)?;
        // SAFETY: the layout's size is not zero.
        let allocated = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        let before = allocated.align_offset(PAGE);
        // SAFETY: the allocation is a page longer than `length`, and `before` is less than a page.
        let start = unsafe { allocated.add(before) };
        Ok(Self {
            place: Place::Host { allocated, start },
            length,
        })
    }

    /// Allocates memory of a GPU.
    pub(in crate::nixl) fn gpu(cuda: &Arc<Cuda>, length: usize) -> Result<Self, String> {
        Ok(Self {
            place: Place::Gpu {
                address: cuda.allocate(length.max(1))?,
                cuda: Arc::clone(cuda),
            },
            length,
        })
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Tells whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns where it begins, in this process's or the GPU's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        match &self.place {
            Place::Host { start, .. } => start.as_ptr().addr() as u64,
            Place::Gpu { address, .. } => *address,
        }
    }

    /// Returns the GPU's number, or none for memory of the host.
    #[must_use]
    pub fn gpu_number(&self) -> Option<u32> {
        match &self.place {
            Place::Host { .. } => None,
            Place::Gpu { cuda, .. } => Some(cuda.number()),
        }
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// They do not fit at `offset`, or the GPU refuses.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), String> {
        self.check(offset, bytes.len())?;
        match &self.place {
            Place::Host { start, .. } => {
                // SAFETY: the range is inside the allocation, and `bytes`, a reference, cannot overlap what is never lent.
                unsafe {
                    start
                        .as_ptr()
                        .add(offset)
                        .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                }
                Ok(())
            }
            Place::Gpu { address, cuda } => cuda.copy_in(address + offset as u64, bytes),
        }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// They are not all inside, or the GPU refuses.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), String> {
        self.check(offset, bytes.len())?;
        match &self.place {
            Place::Host { start, .. } => {
                // SAFETY: as in `write`.
                unsafe {
                    start
                        .as_ptr()
                        .add(offset)
                        .copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
                }
                Ok(())
            }
            Place::Gpu { address, cuda } => cuda.copy_out(address + offset as u64, bytes),
        }
    }

    /// Returns the range of addresses of a part.
    pub(in crate::nixl) fn part(&self, offset: usize, length: usize) -> Result<Range<u64>, String> {
        self.check(offset, length)?;
        let start = self.address() + offset as u64;
        Ok(start..start + length as u64)
    }

    fn check(&self, offset: usize, length: usize) -> Result<(), String> {
        let inside = offset
            .checked_add(length)
            .is_some_and(|end| end <= self.length);
        inside.then_some(()).ok_or_else(|| {
            format!(
                "{length} bytes at {offset} are outside of a memory of {}",
                self.length
            )
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.place {
            Place::Host { allocated, .. } => {
                if let Some(layout) = layout(self.length) {
                    // SAFETY: allocated in `host` with this layout, and freed here alone.
                    unsafe { dealloc(allocated.as_ptr(), layout) };
                }
            }
            Place::Gpu { address, cuda } => cuda.free(*address),
        }
    }
}

/// A page more than asked for, to begin at one, and no more aligned than the system's allocator does by itself: it would write
/// zeros to all of it.
fn layout(length: usize) -> Option<Layout> {
    Layout::from_size_align(length.checked_add(PAGE)?, 16).ok()
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("length", &self.length)
            .field("gpu", &self.gpu_number())
            .finish_non_exhaustive()
    }
}
