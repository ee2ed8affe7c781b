//! Rooms: where the two legs of a concurrent protocol (SGLang, Mooncake) meet while both run.
//!
//! The prefill engine opens a room under the name that the router made, and its answer waits until the room's KV was
//! taken. The decode engine asks the prefill engine's bootstrap service for the room and waits until it is ready; what
//! it is told then is fetched like any other prefill. A room that never opens is waited for until the time is over, as
//! by the real ones: nobody tells a decode engine that its prefill failed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;

use super::Refusal;
use super::ledger::Ledger;

/// Who tells two engines of each other, and by which fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvProtocol {
    /// vLLM's `NixlConnector`: the prefill's answer says where the KV lies.
    #[default]
    Nixl,
    /// SGLang's `--disaggregation-mode`: both legs run at once and name a room.
    Sglang,
    /// vLLM's `MooncakeConnector`: both legs run at once and name a transfer.
    Mooncake,
}

/// Which room of which engine a decode leg takes its KV from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Meeting {
    pub(super) room: String,
    pub(super) host: String,
    pub(super) port: u16,
    /// The engine that must be there, where the protocol names it.
    pub(super) engine: Option<String>,
}

/// The fields of a request body by which routers tell engines of rooms.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct RoomFields<'a> {
    pub(in crate::engine) host: Option<&'a Value>,
    pub(in crate::engine) port: Option<&'a Value>,
    pub(in crate::engine) room: Option<&'a Value>,
}

impl RoomFields<'_> {
    /// Returns SGLang's room, the same on both legs.
    pub(in crate::engine) fn meeting(&self) -> Option<Meeting> {
        // Above 2^53 a reader of floating-point numbers would look for another room.
        let room = self.room?.as_u64().filter(|room| *room < 1 << 53)?;
        Some(Meeting {
            room: room.to_string(),
            host: text(self.host?)?,
            port: port(self.port?.as_u64()?)?,
            engine: None,
        })
    }
}

impl Meeting {
    /// Returns the room's name.
    pub(in crate::engine) fn into_room(self) -> String {
        self.room
    }

    /// Reads Mooncake's parameters of a decode leg.
    pub(in crate::engine) fn of_mooncake(parameters: &Value) -> Option<Self> {
        let address = parameters.get("remote_bootstrap_addr")?.as_str()?;
        let (host, number) = address.strip_prefix("http://")?.rsplit_once(':')?;
        Some(Self {
            room: transfer_id(parameters)?,
            host: host.trim_matches(['[', ']']).to_owned(),
            port: port(number.parse().ok()?)?,
            engine: Some(text(parameters.get("remote_engine_id")?)?),
        })
    }
}

/// Reads the name of a Mooncake transfer.
pub(in crate::engine) fn transfer_id(parameters: &Value) -> Option<String> {
    let id = text(parameters.get("transfer_id")?)?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    id.bytes().all(plain).then_some(id)
}

fn text(value: &Value) -> Option<String> {
    let text = value.as_str()?;
    (!text.is_empty() && text.len() <= super::parameters::MAX_TEXT).then(|| text.to_owned())
}

fn port(number: u64) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port != 0)
}

/// The rooms of one prefill engine, each with the name under which its ledger holds the KV once it is ready.
#[derive(Debug)]
pub(in crate::engine) struct Rooms {
    open: watch::Sender<HashMap<String, Option<Arc<str>>>>,
}

impl Rooms {
    pub(super) fn new() -> Self {
        Self {
            open: watch::Sender::new(HashMap::new()),
        }
    }

    /// Opens a room for a prompt in processing.
    ///
    /// # Errors
    /// [`Refusal::Used`] when it is open: two prompts must not share one.
    pub(in crate::engine) fn open(
        self: &Arc<Self>,
        room: &str,
        ledger: &Arc<Ledger>,
        name: &Arc<str>,
    ) -> Result<OpenRoom, Refusal> {
        let mut taken = false;
        self.open.send_if_modified(|open| {
            taken = open.contains_key(room);
            if !taken {
                open.insert(room.to_owned(), None);
            }
            false
        });
        if taken {
            return Err(Refusal::Used);
        }
        Ok(OpenRoom {
            rooms: Arc::clone(self),
            ledger: Arc::clone(ledger),
            room: room.to_owned(),
            name: Arc::clone(name),
        })
    }

    /// Waits until a room is ready, for as long as the caller does; returns the name under which its KV is held.
    pub(super) async fn ready(&self, room: &str) -> Option<Arc<str>> {
        let mut open = self.open.subscribe();
        let found = |open: &HashMap<String, Option<Arc<str>>>| open.get(room).cloned().flatten();
        let open = open.wait_for(|open| found(open).is_some()).await.ok()?;
        found(&open)
    }
}

/// An open room. Dropping it closes it, and frees what nobody has begun to take.
#[derive(Debug)]
pub(in crate::engine) struct OpenRoom {
    rooms: Arc<Rooms>,
    ledger: Arc<Ledger>,
    room: String,
    name: Arc<str>,
}

impl OpenRoom {
    /// Lets the room's KV be taken and waits until it was.
    ///
    /// # Errors
    /// [`Refusal::Expired`] when nobody came in time.
    pub(in crate::engine) async fn taken(&self) -> Result<(), Refusal> {
        self.rooms.open.send_modify(|open| {
            open.insert(self.room.clone(), Some(Arc::clone(&self.name)));
        });
        loop {
            match self.ledger.ended(&self.name) {
                Some(Refusal::Used) => return Ok(()),
                Some(reason) => return Err(reason),
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }
}

/// How often a prefill looks whether its KV was taken.
const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Drop for OpenRoom {
    fn drop(&mut self) {
        self.rooms.open.send_if_modified(|open| {
            open.remove(&self.room);
            false
        });
        self.ledger.give_up(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_names_a_room_is_read_and_parts_of_it_are_not() {
        let (host, port, room) = (json!("10.0.0.7"), json!(8998), json!(77));
        let fields = RoomFields {
            host: Some(&host),
            port: Some(&port),
            room: Some(&room),
        };
        let meeting = fields.meeting().unwrap();
        assert_eq!((meeting.room.as_str(), meeting.port), ("77", 8_998));
        let inexact = json!((1_u64 << 53) + 1);
        let room = Some(&inexact);
        assert_eq!(RoomFields { room, ..fields }.meeting(), None);
        assert_eq!(
            RoomFields {
                host: None,
                ..fields
            }
            .meeting(),
            None
        );

        let parameters = json!({"transfer_id": "xfer-1", "remote_engine_id": "e", "remote_bootstrap_addr": "http://[::1]:8998"});
        let meeting = Meeting::of_mooncake(&parameters).unwrap();
        assert_eq!((meeting.host.as_str(), meeting.port), ("::1", 8_998));
        for name in ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"] {
            let mut part = parameters.clone();
            part[name] = Value::Null;
            assert_eq!(Meeting::of_mooncake(&part), None, "{name}");
        }
        assert_eq!(transfer_id(&json!({"transfer_id": "../x"})), None);
    }
}
