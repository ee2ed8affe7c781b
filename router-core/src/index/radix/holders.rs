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

/// A set of slots with their marks: a few inline, a sorted list, or one mark for each slot once that is smaller.
#[derive(Debug)]
pub(super) enum Holders {
    /// The first `len` entries, sorted by slot; most runs need no more and no allocation.
    Inline {
        len: u8,
        list: [Holder; INLINE_HOLDERS],
    },
    /// Sorted by slot.
    List(Vec<Holder>),
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
        Self::Inline {
            len: 0,
            list: [Holder(0); INLINE_HOLDERS],
        }
    }
}

impl Holders {
    pub(super) fn mark(&self, slot: u16) -> Option<Mark> {
        if let Self::Dense { marks, .. } = self {
            let mark = marks.get(usize::from(slot)).filter(|&&mark| mark != 0);
            return mark.map(|&mark| Mark(mark));
        }
        let list = self.list();
        let at = list.binary_search_by_key(&slot, |holder| holder.slot());
        at.ok().map(|at| list[at].mark())
    }

    /// Sets what `slot` holds; `None` when nothing. `slots` is the number of slots in use, which decides the shape.
    pub(super) fn set(&mut self, slot: u16, mark: Option<Mark>, slots: usize) {
        if let Self::Dense {
            marks,
            held,
            detailed,
        } = self
        {
            let at = usize::from(slot);
            if at >= marks.len() {
                let more = (at + 1).max(slots) - marks.len();
                marks.reserve_exact(more);
                marks.resize(marks.len() + more, 0);
            }
            let new = mark.map_or(0, |mark| mark.0);
            let old = std::mem::replace(&mut marks[at], new);
            *held = *held + u32::from(new != 0) - u32::from(old != 0);
            let is_detailed = |mark: u16| u32::from(Mark(mark).is_detailed());
            *detailed = *detailed + is_detailed(new) - is_detailed(old);
        } else {
            let list = self.list();
            let at = list.binary_search_by_key(&slot, |holder| holder.slot());
            match (at, mark) {
                (Ok(at), Some(mark)) => self.list_mut()[at] = Holder::new(slot, mark),
                (Ok(at), None) => self.remove(at),
                (Err(at), Some(mark)) => self.insert(at, Holder::new(slot, mark)),
                (Err(_), None) => return,
            }
        }
        self.reshape(slots);
    }

    /// Returns the memory outside the set itself, in bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Inline { .. } => 0,
            Self::List(list) => list.capacity() * size_of::<Holder>(),
            Self::Dense { marks, .. } => marks.capacity() * size_of::<u16>(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Dense { held, .. } => *held as usize,
            Self::Inline { .. } | Self::List(_) => self.list().len(),
        }
    }

    /// Visits every holder in order of slots.
    #[inline]
    pub(super) fn for_each(&self, mut visit: impl FnMut(u16, Mark)) {
        if let Self::Dense { marks, .. } = self {
            for (slot, &mark) in (0..=u16::MAX).zip(marks) {
                if mark != 0 {
                    visit(slot, Mark(mark));
                }
            }
        } else {
            for holder in self.list() {
                visit(holder.slot(), holder.mark());
            }
        }
    }

    /// Returns the sorted entries; none when dense.
    fn list(&self) -> &[Holder] {
        match self {
            Self::Inline { len, list } => &list[..usize::from(*len)],
            Self::List(list) => list,
            Self::Dense { .. } => &[],
        }
    }

    fn list_mut(&mut self) -> &mut [Holder] {
        match self {
            Self::Inline { len, list } => &mut list[..usize::from(*len)],
            Self::List(list) => list,
            Self::Dense { .. } => &mut [],
        }
    }

    fn insert(&mut self, at: usize, holder: Holder) {
        match self {
            Self::Inline { len, list } if usize::from(*len) < INLINE_HOLDERS => {
                list.copy_within(at..usize::from(*len), at + 1);
                list[at] = holder;
                *len += 1;
            }
            Self::Inline { list, .. } => {
                let mut longer = Vec::with_capacity(INLINE_HOLDERS + 2);
                longer.extend_from_slice(list);
                longer.insert(at, holder);
                *self = Self::List(longer);
            }
            Self::List(list) => {
                if list.len() == list.capacity() {
                    list.reserve_exact(list.len() / 4);
                }
                list.insert(at, holder);
            }
            Self::Dense { .. } => {}
        }
    }

    fn remove(&mut self, at: usize) {
        match self {
            Self::Inline { len, list } => {
                list.copy_within(at + 1..usize::from(*len), at);
                *len -= 1;
            }
            Self::List(list) => {
                list.remove(at);
                if list.capacity() > 2 * list.len() + INLINE_HOLDERS {
                    list.shrink_to_fit();
                }
            }
            Self::Dense { .. } => {}
        }
    }

    /// A list costs 4 bytes a holder, an array 2 bytes a slot: a list becomes an array once that is smaller, and an array
    /// or list goes back to the next smaller form at half of what it left it with, so that one holder does not flip it.
    fn reshape(&mut self, slots: usize) {
        let few = self.len() <= INLINE_HOLDERS / 2;
        match self {
            Self::List(list) if few => *self = Self::inline(list),
            Self::List(list) if list.len() * 2 >= slots => {
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
            Self::Dense { marks, held, .. } if few || *held as usize * 4 < marks.len() => {
                let mut list = Vec::with_capacity(*held as usize);
                self.for_each(|slot, mark| list.push(Holder::new(slot, mark)));
                *self = if few {
                    Self::inline(&list)
                } else {
                    Self::List(list)
                };
            }
            Self::Inline { .. } | Self::List(_) | Self::Dense { .. } => {}
        }
    }

    fn inline(few: &[Holder]) -> Self {
        let mut list = [Holder(0); INLINE_HOLDERS];
        list[..few.len()].copy_from_slice(few);
        let len = u8::try_from(few.len()).unwrap_or(0);
        Self::Inline { len, list }
    }
}

/// Holders that lie in the run itself; as many as fit where the other forms have their fields.
const INLINE_HOLDERS: usize = 7;
