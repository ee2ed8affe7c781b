//! Holders whose metadata NIXL has, and when it may forget them: never while somebody fetches from them or a read that was posted
//! still goes on, whether anybody waits for it or not.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

/// Which holders are known. Clones are one.
#[derive(Clone, Debug)]
pub(super) struct Peers(Arc<Inner>);

struct Inner {
    /// The least recently used first.
    peers: Mutex<VecDeque<Peer>>,
    most: usize,
    forget: Box<dyn Fn(&str) + Send + Sync>,
}

#[derive(Debug)]
struct Peer {
    name: String,
    uses: usize,
    is_loaded: bool,
    /// Its metadata may be that of a connection that broke.
    is_stale: bool,
}

/// One fetch from a holder, or one read of its memory. The holder is not forgotten before this is dropped.
#[derive(Debug)]
pub(super) struct Use {
    peers: Peers,
    name: String,
}

impl Peers {
    /// Remembers `most` holders that nobody uses. What `forget` is called with is not known any more; it must not wait.
    pub(super) fn new(most: usize, forget: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Inner {
            peers: Mutex::default(),
            most,
            forget: Box::new(forget),
        }))
    }

    /// Begins to use a holder.
    pub(super) fn begin(&self, name: &str) -> Use {
        let mut peers = self.0.peers.lock();
        let at = peers.iter().position(|peer| peer.name == name);
        let mut peer = at.and_then(|at| peers.remove(at)).unwrap_or_else(|| Peer {
            name: name.to_owned(),
            uses: 0,
            is_loaded: false,
            is_stale: false,
        });
        peer.uses += 1;
        peers.push_back(peer);
        Use {
            peers: self.clone(),
            name: name.to_owned(),
        }
    }
}

impl Use {
    /// Tells whether the holder need not send its metadata.
    pub(super) fn is_known(&self) -> bool {
        self.with(|peer| peer.is_loaded && !peer.is_stale)
    }

    /// Takes note that NIXL has the holder's metadata.
    pub(super) fn loaded(&self) {
        self.with(|peer| peer.is_loaded = true);
    }

    /// Has the holder's metadata forgotten as soon as nobody uses it, so that the next fetch brings it again.
    pub(super) fn failed(&self) {
        self.with(|peer| peer.is_stale = true);
    }

    fn with<T: Default>(&self, act: impl FnOnce(&mut Peer) -> T) -> T {
        let mut peers = self.peers.0.peers.lock();
        let peer = peers.iter_mut().find(|peer| peer.name == self.name);
        // One that is used is there.
        peer.map(act).unwrap_or_default()
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.with(|peer| peer.uses -= 1);
        self.peers.0.tidy();
    }
}

impl Inner {
    /// Forgets those that are to be forgotten, and the least recently used of too many.
    fn tidy(&self) {
        let mut peers = self.peers.lock();
        let mut surplus = peers.len().saturating_sub(self.most);
        peers.retain(|peer| {
            let is_wanted = peer.is_loaded && !peer.is_stale && surplus == 0;
            if peer.uses > 0 || is_wanted {
                return true;
            }
            surplus = surplus.saturating_sub(1);
            if peer.is_loaded {
                // Under the lock: it may be loaded anew right afterwards, and must not be forgotten then.
                (self.forget)(&peer.name);
            }
            false
        });
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Inner").field(&*self.peers.lock()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Two holders are remembered; what was forgotten is listed.
    fn peers() -> (Peers, impl Fn() -> Vec<String>) {
        let forgotten = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&forgotten);
        let peers = Peers::new(2, move |name| list.lock().push(name.to_owned()));
        (peers, move || std::mem::take(&mut *forgotten.lock()))
    }

    fn met(peers: &Peers, name: &str) -> Use {
        let fetch = peers.begin(name);
        fetch.loaded();
        fetch
    }

    #[test]
    fn one_that_failed_is_forgotten_when_its_last_read_is_over() {
        let (peers, forgotten) = peers();
        let (fetch, read) = (met(&peers, "a"), peers.begin("a"));
        assert!(read.is_known());
        fetch.failed();
        drop(fetch);
        assert_eq!(forgotten(), [""; 0], "a read goes on");
        assert!(!peers.begin("a").is_known(), "its metadata comes again");
        assert_eq!(forgotten(), [""; 0]);
        drop(read);
        assert_eq!(forgotten(), ["a"]);
        assert!(!peers.begin("a").is_known());
        assert_eq!(forgotten(), [""; 0], "it was not loaded again");
    }

    #[test]
    fn of_too_many_the_least_recently_used_goes_that_nobody_uses() {
        let (peers, forgotten) = peers();
        let a = met(&peers, "a");
        for name in ["b", "c", "b", "d"] {
            drop(met(&peers, name));
        }
        // With a, which is used, and b and c there were three.
        assert_eq!(forgotten(), ["b", "c", "b"]);
        drop(a);
        assert!(peers.begin("a").is_known() && peers.begin("d").is_known());
        drop(met(&peers, "e"));
        assert_eq!(forgotten(), ["a"]);
    }

    #[test]
    fn in_random_orders_none_is_forgotten_while_it_is_used_and_few_are_kept() {
        for seed in 0..500 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (peers, forgotten) = peers();
            let mut uses: Vec<Use> = Vec::new();
            let mut loaded: HashMap<String, bool> = HashMap::new();
            for _ in 0..200 {
                let name = ["a", "b", "c", "d", "e"][random.usize(..5)];
                match random.usize(..6) {
                    0 | 1 => {
                        let fetch = peers.begin(name);
                        if !fetch.is_known() {
                            fetch.loaded();
                            loaded.insert(name.to_owned(), true);
                        }
                        assert!(loaded[name], "what is known was not forgotten");
                        uses.push(fetch);
                    }
                    2 if !uses.is_empty() => uses[random.usize(..uses.len())].failed(),
                    _ if !uses.is_empty() => drop(uses.swap_remove(random.usize(..uses.len()))),
                    _ => {}
                }
                for name in forgotten() {
                    assert!(uses.iter().all(|of| of.name != name), "seed {seed}: {name}");
                    assert_eq!(loaded.insert(name, false), Some(true), "forgotten twice");
                }
            }
            uses.clear();
            assert!(peers.0.peers.lock().len() <= 2);
        }
    }
}
