//! The prompts of booked requests as a tree of prefixes, and who has them.
//!
//! A node's edge is a piece of a booked prompt, which it shares with the booking. Bookings end at the end of a node, so
//! every booking through a node has all of its edge.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::block::{LocalBlockHash, common_prefix};
use crate::ids::LeaseId;

/// The number of no node.
pub(super) const NONE: u32 = u32::MAX;

/// A request of one slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Booking {
    pub(super) slot: u32,
    pub(super) lease: LeaseId,
    /// Leading blocks that need no prefill; infinite once all of it is done.
    pub(super) cached: f64,
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    slot: u32,
    bookings: u32,
}

#[derive(Debug)]
struct Node {
    /// The edge is `prompt[start..end]`; a free node has none.
    prompt: Option<Arc<[LocalBlockHash]>>,
    start: usize,
    end: usize,
    parent: u32,
    children: u32,
    /// Exclusive or of the children's numbers: names the child when it is the only one.
    children_xor: u32,
    bookings: u32,
    /// By slot.
    holders: Vec<Holder>,
    /// Bookings that still have to compute a part of the edge.
    prefills: Vec<Booking>,
}

#[derive(Debug, Default)]
pub(super) struct Tree {
    /// Free nodes keep the memory of their lists.
    nodes: Vec<Node>,
    free: Vec<u32>,
    /// Node by its parent and the first hash of its edge.
    heads: HashMap<(u32, LocalBlockHash), u32>,
}

impl Tree {
    /// Calls `held(slot, blocks)` along the prompt, with growing `blocks` for a slot, and `prefill(slot, blocks)` with parts of
    /// the prompt that are to be computed for others, to be added up.
    pub(super) fn look_up(
        &self,
        prompt: &[LocalBlockHash],
        mut held: impl FnMut(u32, usize),
        mut prefill: impl FnMut(u32, f64),
    ) {
        let (mut parent, mut depth) = (NONE, 0);
        while let Some(number) = self.child(parent, &prompt[depth..]) {
            let node = &self.nodes[number as usize];
            depth += common_prefix(node.edge(), &prompt[depth..]);
            for holder in &node.holders {
                held(holder.slot, depth);
            }
            for booking in &node.prefills {
                let from = booking.cached.max(node.start as f64);
                if (depth as f64) > from {
                    prefill(booking.slot, depth as f64 - from);
                }
            }
            if depth < node.end {
                return;
            }
            parent = number;
        }
    }

    /// Adds a booking of a prompt that is not empty. Returns the node that it ends at and the blocks that its slot did not
    /// have before.
    pub(super) fn add(&mut self, prompt: &Arc<[LocalBlockHash]>, booking: Booking) -> (u32, usize) {
        let (mut parent, mut depth, mut new_blocks) = (NONE, 0, 0);
        while depth < prompt.len() {
            let number = match self.child(parent, &prompt[depth..]) {
                None => self.grow(parent, prompt, depth),
                Some(number) => {
                    let edge = self.nodes[number as usize].edge();
                    let shared = common_prefix(edge, &prompt[depth..]);
                    if shared < edge.len() {
                        self.split(number, shared)
                    } else {
                        number
                    }
                }
            };
            let node = &mut self.nodes[number as usize];
            if node.enter(booking) {
                new_blocks += node.end - node.start;
            }
            (parent, depth) = (number, node.end);
        }
        (parent, new_blocks)
    }

    /// Removes a booking by the node that it ends at. Returns the blocks that its slot no longer has.
    pub(super) fn remove(&mut self, leaf: u32, booking: Booking) -> usize {
        let (mut number, mut freed) = (leaf, 0);
        while number != NONE {
            let node = &mut self.nodes[number as usize];
            if node.leave(booking) {
                freed += node.end - node.start;
            }
            let (parent, bookings) = (node.parent, node.bookings);
            if bookings == 0 {
                self.drop_node(number);
            } else {
                self.join_only_child(number);
            }
            number = parent;
        }
        self.shrink();
        freed
    }

    /// Notes that a booking has nothing left to compute.
    pub(super) fn computed(&mut self, leaf: u32, booking: Booking) {
        let mut number = leaf;
        while number != NONE {
            let node = &mut self.nodes[number as usize];
            if booking.cached >= node.end as f64 {
                return; // nor had it in the nodes before
            }
            node.forget_prefill(booking.lease);
            number = node.parent;
        }
    }

    /// Returns the child of `parent` that `rest` goes on in.
    fn child(&self, parent: u32, rest: &[LocalBlockHash]) -> Option<u32> {
        self.heads.get(&(parent, *rest.first()?)).copied()
    }

    /// Adds a node with the rest of a prompt below `parent`.
    fn grow(&mut self, parent: u32, prompt: &Arc<[LocalBlockHash]>, start: usize) -> u32 {
        let number = self.take_node(Some(Arc::clone(prompt)), start, prompt.len());
        self.nodes[number as usize].parent = parent;
        self.heads.insert((parent, prompt[start]), number);
        self.count_child(parent, number, true);
        number
    }

    /// Splits a node after `length` blocks and returns the new node above it.
    fn split(&mut self, number: u32, length: usize) -> u32 {
        let node = &self.nodes[number as usize];
        let (prompt, start, parent) = (node.prompt.clone(), node.start, node.parent);
        let middle = start + length;
        let (head, joint) = (node.edge()[0], node.edge()[length]);
        let upper = self.take_node(prompt, start, middle);
        let [above, below] = self
            .nodes
            .get_disjoint_mut([upper as usize, number as usize])
            .expect("a new node has a number of its own");
        above.parent = parent;
        above.bookings = below.bookings;
        above.holders.extend_from_slice(&below.holders);
        let in_upper = |booking: &&Booking| booking.cached < middle as f64;
        above
            .prefills
            .extend(below.prefills.iter().filter(in_upper));
        (above.children, above.children_xor) = (1, number);
        below.start = middle;
        below.parent = upper;
        self.heads.insert((parent, head), upper);
        self.heads.insert((upper, joint), number);
        if parent != NONE {
            self.nodes[parent as usize].children_xor ^= number ^ upper;
        }
        upper
    }

    /// Joins a node with its child when it has one only and every booking goes on there.
    fn join_only_child(&mut self, number: u32) {
        let node = &self.nodes[number as usize];
        let (parent, child) = (node.parent, node.children_xor);
        if node.children != 1 || self.nodes[child as usize].bookings != node.bookings {
            return;
        }
        let (start, head) = (node.start, node.edge()[0]);
        let below = &mut self.nodes[child as usize];
        let joint = below.edge()[0];
        // The child's prompt has the same blocks before its edge.
        below.start = start;
        below.parent = parent;
        self.heads.remove(&(number, joint));
        self.heads.insert((parent, head), child);
        if parent != NONE {
            self.nodes[parent as usize].children_xor ^= number ^ child;
        }
        self.leave_node(number);
    }

    fn drop_node(&mut self, number: u32) {
        let node = &self.nodes[number as usize];
        let (parent, head) = (node.parent, node.edge()[0]);
        self.heads.remove(&(parent, head));
        self.count_child(parent, number, false);
        self.leave_node(number);
    }

    fn count_child(&mut self, parent: u32, child: u32, is_new: bool) {
        if parent == NONE {
            return;
        }
        let parent = &mut self.nodes[parent as usize];
        parent.children_xor ^= child;
        if is_new {
            parent.children += 1;
        } else {
            parent.children -= 1;
        }
    }

    fn take_node(
        &mut self,
        prompt: Option<Arc<[LocalBlockHash]>>,
        start: usize,
        end: usize,
    ) -> u32 {
        if let Some(number) = self.free.pop() {
            let node = &mut self.nodes[number as usize];
            node.prompt = prompt;
            (node.start, node.end) = (start, end);
            (node.children, node.children_xor, node.bookings) = (0, 0, 0);
            return number;
        }
        let number = u32::try_from(self.nodes.len()).unwrap_or(NONE);
        assert!(number != NONE, "2^32 nodes do not fit memory");
        self.nodes.push(Node {
            prompt,
            start,
            end,
            parent: NONE,
            children: 0,
            children_xor: 0,
            bookings: 0,
            holders: Vec::new(),
            prefills: Vec::new(),
        });
        number
    }

    fn leave_node(&mut self, number: u32) {
        let node = &mut self.nodes[number as usize];
        node.prompt = None;
        for_reuse(&mut node.holders);
        for_reuse(&mut node.prefills);
        self.free.push(number);
    }

    /// Gives memory back once nothing is booked.
    fn shrink(&mut self) {
        if self.free.len() == self.nodes.len() && self.nodes.len() > KEPT_NODES {
            *self = Self::default();
        }
    }
}

/// Nodes that stay allocated while nothing is booked.
const KEPT_NODES: usize = 64;

/// Empties a list and keeps its memory when that is little.
fn for_reuse<T>(list: &mut Vec<T>) {
    list.clear();
    if list.capacity() > 16 {
        *list = Vec::new();
    }
}

impl Node {
    fn edge(&self) -> &[LocalBlockHash] {
        let prompt = self.prompt.as_deref().unwrap_or_default();
        &prompt[self.start..self.end]
    }

    /// Returns whether the slot is new here.
    fn enter(&mut self, booking: Booking) -> bool {
        self.bookings += 1;
        if booking.cached < self.end as f64 {
            self.prefills.push(booking);
        }
        let at = self
            .holders
            .partition_point(|held| held.slot < booking.slot);
        match self.holders.get_mut(at) {
            Some(holder) if holder.slot == booking.slot => {
                holder.bookings += 1;
                false
            }
            _ => {
                let (slot, bookings) = (booking.slot, 1);
                self.holders.insert(at, Holder { slot, bookings });
                true
            }
        }
    }

    /// Returns whether it was the last of its slot here.
    fn leave(&mut self, booking: Booking) -> bool {
        self.bookings -= 1;
        if booking.cached < self.end as f64 {
            self.forget_prefill(booking.lease);
        }
        let at = self
            .holders
            .partition_point(|held| held.slot < booking.slot);
        let holder = &mut self.holders[at];
        debug_assert_eq!(holder.slot, booking.slot);
        holder.bookings -= 1;
        let is_last = holder.bookings == 0;
        if is_last {
            self.holders.remove(at);
        }
        is_last
    }

    fn forget_prefill(&mut self, lease: LeaseId) {
        if let Some(at) = self.prefills.iter().position(|other| other.lease == lease) {
            self.prefills.swap_remove(at);
        }
    }
}

#[cfg(test)]
impl Tree {
    pub(super) fn is_empty(&self) -> bool {
        self.heads.is_empty() && self.free.len() == self.nodes.len()
    }

    /// Checks that no node could be joined and that counts add up.
    pub(super) fn check(&self) {
        for (&(parent, head), &number) in &self.heads {
            let node = &self.nodes[number as usize];
            assert_eq!((node.parent, node.edge()[0]), (parent, head));
            let held: u32 = node.holders.iter().map(|holder| holder.bookings).sum();
            assert_eq!(held, node.bookings);
            assert!(node.bookings > 0);
            assert!(node.holders.is_sorted_by_key(|holder| holder.slot));
            let of = self
                .heads
                .iter()
                .filter(|((parent, _), _)| *parent == number);
            let children: Vec<u32> = of.map(|(_, child)| *child).collect();
            assert_eq!(children.len(), node.children as usize);
            let below: u32 = children
                .iter()
                .map(|&child| self.nodes[child as usize].bookings)
                .sum();
            assert!(below <= node.bookings);
            assert!(children.len() != 1 || below < node.bookings, "not joined");
        }
    }
}
