//! Which slots hold how much of one run.

/// What one slot holds of one run, in 16 bits.
///
/// A *plain* mark says that the slot holds exactly the first [`cutoff`](Self::cutoff) blocks, on its device, in units of
/// one block. A *detailed* mark says that a [`Detail`](super::detail::Detail) tells what is held; its cutoff is the unbroken
/// prefix in units of one block over all tiers, and may be 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(u16);

impl Mark {
    const DETAILED: u16 = 1 << 15;

    pub(super) const fn plain(cutoff: u16) -> Self {
        Self(cutoff)
    }

    pub(super) const fn detailed(cutoff: u16) -> Self {
        Self(cutoff | Self::DETAILED)
    }

    pub(super) const fn cutoff(self) -> u16 {
        self.0 & !Self::DETAILED
    }

    pub(super) const fn is_detailed(self) -> bool {
        self.0 & Self::DETAILED != 0
    }
}

/// One entry of a sparse list: slot in the high half, mark in the low one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holder(u32);

impl Holder {
    const fn new(slot: u16, mark: Mark) -> Self {
        Self((slot as u32) << 16 | mark.0 as u32)
    }

    pub(super) const fn slot(self) -> u16 {
        (self.0 >> 16) as u16
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "the mark is the low half on purpose"
    )]
    pub(super) const fn mark(self) -> Mark {
        Mark(self.0 as u16)
    }
}

/// A set of slots with their marks: a sorted list while few slots hold the run, one mark for each slot once that is smaller.
#[derive(Debug)]
pub(super) enum Holders {
    Sparse(Vec<Holder>),
    /// Mark 0 stands for "holds nothing"; `held` counts the others.
    Dense {
        marks: Vec<u16>,
        held: u32,
        /// How many marks are detailed.
        detailed: u32,
    },
}

impl Default for Holders {
    fn default() -> Self {
        Self::Sparse(Vec::new())
    }
}

impl Holders {
    pub(super) fn mark(&self, slot: u16) -> Option<Mark> {
        match self {
            Self::Sparse(list) => {
                let at = list.binary_search_by_key(&slot, |holder| holder.slot());
                at.ok().map(|at| list[at].mark())
            }
            Self::Dense { marks, .. } => marks
                .get(usize::from(slot))
                .filter(|&&mark| mark != 0)
                .map(|&mark| Mark(mark)),
        }
    }

    /// Sets what `slot` holds; `None` when nothing. `slots` is the number of slots in use, which decides the shape.
    pub(super) fn set(&mut self, slot: u16, mark: Option<Mark>, slots: usize) {
        match self {
            Self::Sparse(list) => {
                let at = list.binary_search_by_key(&slot, |holder| holder.slot());
                match (at, mark) {
                    (Ok(at), Some(mark)) => list[at] = Holder::new(slot, mark),
                    (Ok(at), None) => {
                        list.remove(at);
                        if list.capacity() > 2 * list.len() + SPARSE_HOLDERS {
                            list.shrink_to_fit();
                        }
                    }
                    (Err(at), Some(mark)) => {
                        if list.len() == list.capacity() {
                            list.reserve_exact((list.len() / 4).max(1));
                        }
                        list.insert(at, Holder::new(slot, mark));
                    }
                    (Err(_), None) => {}
                }
            }
            Self::Dense {
                marks,
                held,
                detailed,
            } => {
                let at = usize::from(slot);
                if at >= marks.len() {
                    if mark.is_none() {
                        return;
                    }
                    let more = (at + 1).max(slots) - marks.len();
                    marks.reserve_exact(more);
                    marks.resize(marks.len() + more, 0);
                }
                let new = mark.map_or(0, |mark| mark.0);
                let old = std::mem::replace(&mut marks[at], new);
                *held = *held + u32::from(new != 0) - u32::from(old != 0);
                let is_detailed = |mark: u16| u32::from(Mark(mark).is_detailed());
                *detailed = *detailed + is_detailed(new) - is_detailed(old);
            }
        }
        self.reshape(slots);
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Sparse(list) => list.len(),
            Self::Dense { held, .. } => *held as usize,
        }
    }

    /// Visits every holder in order of slots.
    pub(super) fn for_each(&self, mut visit: impl FnMut(u16, Mark)) {
        match self {
            Self::Sparse(list) => list
                .iter()
                .for_each(|holder| visit(holder.slot(), holder.mark())),
            Self::Dense { marks, .. } => {
                for (slot, &mark) in (0..=u16::MAX).zip(marks) {
                    if mark != 0 {
                        visit(slot, Mark(mark));
                    }
                }
            }
        }
    }

    /// A list costs 4 bytes a holder, an array 2 bytes a slot. A list longer than [`SPARSE_HOLDERS`] becomes an array
    /// once that is smaller, and an array a list again at half of that, so that one holder more or less does not flip it.
    fn reshape(&mut self, slots: usize) {
        match self {
            Self::Sparse(list) if list.len() > SPARSE_HOLDERS && list.len() * 2 >= slots => {
                let last = list.last().map_or(0, |holder| usize::from(holder.slot()));
                let mut marks = vec![0; slots.max(last + 1)];
                for holder in list.iter() {
                    marks[usize::from(holder.slot())] = holder.mark().0;
                }
                let held = u32::try_from(list.len()).unwrap_or(u32::MAX);
                let details = list.iter().filter(|holder| holder.mark().is_detailed());
                let detailed = u32::try_from(details.count()).unwrap_or(u32::MAX);
                *self = Self::Dense {
                    marks,
                    held,
                    detailed,
                };
            }
            Self::Dense { marks, held, .. }
                if *held as usize * 4 < marks.len() || (*held as usize) < SPARSE_HOLDERS / 2 =>
            {
                let mut list = Vec::with_capacity(*held as usize);
                for (slot, &mark) in (0..=u16::MAX).zip(marks.iter()) {
                    if mark != 0 {
                        list.push(Holder::new(slot, Mark(mark)));
                    }
                }
                *self = Self::Sparse(list);
            }
            Self::Sparse(_) | Self::Dense { .. } => {}
        }
    }
}

/// Longest list that is never turned into an array.
const SPARSE_HOLDERS: usize = 8;
