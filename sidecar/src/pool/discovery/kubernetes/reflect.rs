//! What is known of one kind of object in the cluster: lists and watch events in, the whole set out. Pure.
//!
//! A list counts once all of its pages are there, so no half of one is ever seen; it says all there is, so what it lacks is
//! gone whatever was missed before. A watch event counts when it is newer than what is known of its object: one that comes
//! twice, late, or from the life of an object that has ended changes nothing.

use std::collections::BTreeMap;
use std::fmt;

/// Which object: names are unique in a namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A resource version as the API server writes it; empty where it says none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version(pub String);

impl Version {
    /// Returns the number that orders it among others of its kind.
    ///
    /// Kubernetes documents such an order since 1.35 and has always had it. What is no number is taken to be new.
    #[must_use]
    pub fn number(&self) -> Option<u128> {
        self.0.parse().ok()
    }
}

/// One object, reduced to what is needed of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen<T> {
    /// Which object.
    pub key: Key,
    /// Which life of it; empty where the server says none.
    pub uid: String,
    /// When it was so.
    pub version: Version,
    /// What it says.
    pub value: T,
}

/// What comes from the API server.
#[derive(Clone, Debug)]
pub enum Input<T> {
    /// One page of a list.
    Page {
        /// Its objects.
        items: Vec<Seen<T>>,
        /// The version of the whole list.
        version: Version,
        /// Where the next page begins; `None` on the last.
        next: Option<String>,
    },
    /// An object was added or modified.
    Applied(Seen<T>),
    /// An object was deleted, or no longer matches the selector.
    Deleted(Seen<T>),
    /// Everything up to this version has been sent.
    Bookmark(Version),
    /// The version to go on from is no longer known (410), or an event was lost.
    Expired,
    /// A request failed, or a watch broke off.
    Failed,
}

/// What to ask for next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The next page of a list.
    List {
        /// Where it begins; `None` for the first.
        next: Option<String>,
        /// It may be one page of several.
        paged: bool,
    },
    /// The events after a version.
    Watch(Version),
}

/// The set of objects, as far as it is known.
#[derive(Debug)]
pub struct Reflection<T> {
    objects: BTreeMap<Key, Seen<T>>,
    /// A list that is not complete yet.
    listing: Option<Listing<T>>,
    /// The version up to which everything is known.
    version: Version,
    /// The version of the last list: what is older was taken into account by it.
    floor: u128,
    /// The versions at which objects ended since the last list.
    graves: BTreeMap<Key, u128>,
    failures: u32,
    is_synced: bool,
}

#[derive(Debug)]
struct Listing<T> {
    objects: BTreeMap<Key, Seen<T>>,
    next: Option<String>,
    paged: bool,
}

/// Failures in a row after which everything is listed anew, whatever they were.
const PATIENCE: u32 = 3;
/// Most ended objects that are remembered between two lists.
const MAX_GRAVES: usize = 4_096;

impl<T> Default for Reflection<T> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            listing: Some(Listing::new(true)),
            version: Version::default(),
            floor: 0,
            graves: BTreeMap::new(),
            failures: 0,
            is_synced: false,
        }
    }
}

impl<T> Listing<T> {
    const fn new(paged: bool) -> Self {
        Self {
            objects: BTreeMap::new(),
            next: None,
            paged,
        }
    }
}

impl<T> Reflection<T> {
    /// Returns what to ask for next.
    #[must_use]
    pub fn step(&self) -> Step {
        match &self.listing {
            Some(listing) => Step::List {
                next: listing.next.clone(),
                paged: listing.paged,
            },
            None => Step::Watch(self.version.clone()),
        }
    }

    /// Returns the objects: those of the last complete list, and what has changed since.
    #[must_use]
    pub const fn objects(&self) -> &BTreeMap<Key, Seen<T>> {
        &self.objects
    }

    /// Returns how many objects of a list that is not complete are there.
    #[must_use]
    pub fn pending(&self) -> usize {
        let listing = self.listing.as_ref();
        listing.map_or(0, |listing| listing.objects.len())
    }

    /// Tells whether a list has ever been complete.
    #[must_use]
    pub const fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// Takes in what the server sent; tells whether the objects may have changed.
    pub fn apply(&mut self, input: Input<T>) -> bool {
        if !matches!(input, Input::Failed | Input::Expired) {
            self.failures = 0;
        }
        match input {
            Input::Page {
                items,
                version,
                next,
            } => self.page(items, version, next),
            Input::Applied(object) => self.applied(object),
            Input::Deleted(object) => self.deleted(&object),
            Input::Bookmark(version) => {
                if self.listing.is_none() {
                    self.advance(&version);
                }
                false
            }
            Input::Expired => {
                // Where a list expires between two pages, it is asked for in one.
                let is_first = self
                    .listing
                    .as_ref()
                    .is_none_or(|listing| listing.next.is_none() && listing.paged);
                self.listing = Some(Listing::new(is_first));
                false
            }
            Input::Failed => {
                self.failures += 1;
                if self.failures >= PATIENCE && self.listing.is_none() {
                    self.failures = 0;
                    self.listing = Some(Listing::new(true));
                }
                false
            }
        }
    }

    fn page(&mut self, items: Vec<Seen<T>>, version: Version, next: Option<String>) -> bool {
        let Some(mut listing) = self.listing.take() else {
            return false;
        };
        let items = items.into_iter().map(|item| (item.key.clone(), item));
        listing.objects.extend(items);
        if next.is_some() {
            listing.next = next;
            self.listing = Some(listing);
            return false;
        }
        self.objects = listing.objects;
        self.floor = version.number().unwrap_or(0);
        self.version = version;
        self.graves.clear();
        self.is_synced = true;
        true
    }

    fn applied(&mut self, object: Seen<T>) -> bool {
        if self.listing.is_some() {
            return false;
        }
        self.advance(&object.version);
        if let Some(number) = object.version.number() {
            let held = self.objects.get(&object.key);
            let held = held.and_then(|held| held.version.number());
            if number <= self.floor || held >= Some(number) {
                return false;
            }
            if self.graves.get(&object.key) >= Some(&number) {
                return false;
            }
        }
        self.objects.insert(object.key.clone(), object);
        true
    }

    fn deleted(&mut self, object: &Seen<T>) -> bool {
        if self.listing.is_some() {
            return false;
        }
        self.advance(&object.version);
        let number = object.version.number();
        if number.is_some_and(|number| number <= self.floor) {
            return false;
        }
        if let Some(number) = number {
            self.bury(&object.key, number);
        }
        let held = self.objects.get(&object.key);
        if number.is_some() {
            if held.is_some_and(|held| held.version.number() > number) {
                return false;
            }
        } else if held.is_some_and(|held| held.uid != object.uid) {
            // The end of an earlier life of that name.
            return false;
        }
        self.objects.remove(&object.key).is_some()
    }

    /// Goes on from this version when the watch has to be begun anew; never back.
    fn advance(&mut self, version: &Version) {
        if version.0.is_empty() || version.number() < self.version.number() {
            return;
        }
        self.version = version.clone();
    }

    fn bury(&mut self, key: &Key, number: u128) {
        let grave = self.graves.entry(key.clone()).or_insert(number);
        *grave = number.max(*grave);
        if self.graves.len() > MAX_GRAVES {
            let oldest = self.graves.iter().min_by_key(|(_, number)| **number);
            if let Some((key, number)) = oldest.map(|(key, number)| (key.clone(), *number)) {
                self.graves.remove(&key);
                // What is remembered no more must still not come back; a server sends nothing that late.
                self.floor = self.floor.max(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key {
            namespace: "ns".to_owned(),
            name: name.to_owned(),
        }
    }

    fn seen(name: &str, uid: &str, version: &str, value: u32) -> Seen<u32> {
        Seen {
            key: key(name),
            uid: uid.to_owned(),
            version: Version(version.to_owned()),
            value,
        }
    }

    fn page(items: Vec<Seen<u32>>, version: &str, next: Option<&str>) -> Input<u32> {
        Input::Page {
            items,
            version: Version(version.to_owned()),
            next: next.map(str::to_owned),
        }
    }

    fn listed(items: Vec<Seen<u32>>, version: &str) -> Reflection<u32> {
        let mut reflection = Reflection::default();
        assert!(reflection.apply(page(items, version, None)));
        reflection
    }

    fn values(reflection: &Reflection<u32>) -> Vec<(&str, u32)> {
        let objects = reflection.objects().values();
        objects
            .map(|object| (object.key.name.as_str(), object.value))
            .collect()
    }

    fn watch(version: &str) -> Step {
        Step::Watch(Version(version.to_owned()))
    }

    #[test]
    fn pages_count_together_or_not_at_all() {
        let mut reflection = Reflection::default();
        assert!(!reflection.apply(page(vec![seen("a", "1", "4", 1)], "9", Some("token"))));
        assert!(reflection.objects().is_empty() && !reflection.is_synced());
        let next = Step::List {
            next: Some("token".to_owned()),
            paged: true,
        };
        assert_eq!(reflection.step(), next);
        assert!(reflection.apply(page(vec![seen("b", "2", "5", 2)], "9", None)));
        assert_eq!(values(&reflection), [("a", 1), ("b", 2)]);
        assert_eq!(reflection.step(), watch("9"));
    }

    #[test]
    fn a_list_that_expires_between_pages_is_asked_for_in_one() {
        let mut reflection = Reflection::default();
        reflection.apply(page(vec![seen("a", "1", "4", 1)], "9", Some("token")));
        reflection.apply(Input::Expired);
        let whole = Step::List {
            next: None,
            paged: false,
        };
        assert_eq!(reflection.step(), whole);
        reflection.apply(page(vec![seen("b", "2", "5", 2)], "11", None));
        assert_eq!(values(&reflection), [("b", 2)]);
    }

    #[test]
    fn a_relist_keeps_the_last_set_until_it_is_complete_and_drops_ghosts() {
        let mut reflection = listed(vec![seen("a", "1", "4", 1), seen("b", "2", "5", 2)], "9");
        assert!(!reflection.apply(Input::Expired));
        assert_eq!(values(&reflection), [("a", 1), ("b", 2)]);
        // An event of the watch that expired comes too late.
        assert!(!reflection.apply(Input::Applied(seen("c", "3", "10", 3))));
        assert!(reflection.apply(page(vec![seen("a", "1", "4", 1)], "12", None)));
        assert_eq!(values(&reflection), [("a", 1)]);
        assert!(!reflection.apply(Input::Applied(seen("b", "2", "11", 2))));
        assert_eq!(values(&reflection), [("a", 1)]);
    }

    #[test]
    fn events_that_come_twice_or_late_change_nothing() {
        let mut reflection = listed(vec![seen("a", "1", "4", 1)], "9");
        assert!(!reflection.apply(Input::Applied(seen("a", "1", "4", 7))));
        assert!(reflection.apply(Input::Applied(seen("a", "1", "12", 3))));
        assert!(!reflection.apply(Input::Applied(seen("a", "1", "12", 3))));
        assert!(!reflection.apply(Input::Applied(seen("a", "1", "11", 2))));
        assert_eq!(values(&reflection), [("a", 3)]);
        assert!(reflection.apply(Input::Deleted(seen("a", "1", "13", 3))));
        assert!(!reflection.apply(Input::Applied(seen("a", "1", "12", 3))));
        assert!(!reflection.apply(Input::Deleted(seen("a", "1", "13", 3))));
        assert_eq!(values(&reflection), []);
        // The next life of the name; the end of the last one comes again.
        assert!(reflection.apply(Input::Applied(seen("a", "2", "14", 4))));
        assert!(!reflection.apply(Input::Deleted(seen("a", "1", "13", 3))));
        assert_eq!(values(&reflection), [("a", 4)]);
    }

    #[test]
    fn a_watch_goes_on_from_the_latest_version() {
        let mut reflection = listed(Vec::new(), "9");
        reflection.apply(Input::Applied(seen("a", "1", "20", 1)));
        reflection.apply(Input::Applied(seen("b", "2", "15", 1)));
        assert_eq!(reflection.step(), watch("20"));
        reflection.apply(Input::Bookmark(Version("31".to_owned())));
        assert_eq!(reflection.step(), watch("31"));
        for _ in 0..2 {
            reflection.apply(Input::Failed);
            assert_eq!(reflection.step(), watch("31"));
        }
        reflection.apply(Input::Failed);
        assert!(matches!(reflection.step(), Step::List { next: None, .. }));
        assert_eq!(values(&reflection), [("a", 1), ("b", 1)]);
    }

    #[test]
    fn a_list_is_believed_even_where_versions_went_back() {
        let mut reflection = listed(vec![seen("a", "1", "900", 1)], "1000");
        reflection.apply(Input::Expired);
        reflection.apply(page(vec![seen("a", "9", "5", 2)], "7", None));
        assert_eq!(values(&reflection), [("a", 2)]);
        assert!(reflection.apply(Input::Applied(seen("b", "3", "8", 3))));
        assert_eq!(reflection.step(), watch("8"));
    }

    #[test]
    fn without_numbers_events_are_taken_as_they_come() {
        let mut reflection = listed(vec![seen("a", "1", "", 1)], "...");
        assert_eq!(reflection.step(), watch("..."));
        assert!(reflection.apply(Input::Applied(seen("a", "1", "", 2))));
        assert!(!reflection.apply(Input::Deleted(seen("a", "0", "", 2))));
        assert!(reflection.apply(Input::Deleted(seen("a", "1", "", 2))));
        assert_eq!(reflection.step(), watch("..."));
    }

    #[test]
    fn what_is_remembered_of_ended_objects_is_bounded() {
        let mut reflection = listed(Vec::new(), "0");
        for number in 1..=5_000_u32 {
            let name = format!("pod-{number}");
            reflection.apply(Input::Deleted(seen(&name, "u", &number.to_string(), 0)));
        }
        assert_eq!(reflection.graves.len(), MAX_GRAVES);
        assert!(!reflection.apply(Input::Applied(seen("pod-1", "u", "1", 0))));
        assert!(reflection.apply(Input::Applied(seen("pod-1", "v", "5001", 0))));
    }
}
