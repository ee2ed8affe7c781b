//! A small API server over HTTP: lists in pages, watches with bookmarks, the scale subresource, and every way to fail.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::cluster::{Query, Store};

/// What goes wrong with a request.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// An error status: code and reason.
    Status(u16, &'static str),
    /// No answer, ever.
    Hang,
    /// The watch says `ERROR` with this code and reason, and ends.
    Error(u16, &'static str),
    /// The watch ends at once, in order.
    End,
    /// The connection breaks in the middle of an event.
    Break,
    /// The watch sends a line that is no event.
    Garbage,
    /// Somebody else changes the object between reading and writing.
    Race,
}

/// One request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// `list pods`, `watch pods`, `get statefulsets/scale`, `update statefulsets/scale`.
    pub(crate) what: String,
    pub(crate) query: Vec<(String, String)>,
}

impl Asked {
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let found = self.query.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str())
    }
}

/// The server; ends when dropped.
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
    folder: tempfile::TempDir,
}

struct Shared {
    store: Mutex<Store>,
    changed: watch::Sender<u64>,
    faults: Mutex<Vec<(String, usize, Fault)>>,
    asked: Mutex<Vec<Asked>>,
    /// Groups that are known, besides the built-in ones.
    groups: Mutex<Vec<String>>,
    /// Sends every event twice, and the events at hand last first.
    is_messy: Mutex<bool>,
    /// Between two bookmarks.
    bookmarks: Duration,
}

type Answer = Response<BoxBody<Bytes, std::io::Error>>;

impl Api {
    pub(crate) async fn start() -> Self {
        Self::start_at("127.0.0.1:0").await
    }

    async fn start_at(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            store: Mutex::new(Store::default()),
            changed: watch::channel(0).0,
            faults: Mutex::default(),
            asked: Mutex::default(),
            groups: Mutex::new(vec!["inference.networking.k8s.io".to_owned()]),
            is_messy: Mutex::new(false),
            bookmarks: Duration::from_millis(200),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, Arc::clone(&shared)));
        Self {
            address,
            shared,
            _tasks: tasks,
            folder: tempfile::tempdir().unwrap(),
        }
    }

    /// Writes a kubeconfig that leads here.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        let path = self.folder.path().join("kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "test", "user": {"token": "secret"}}],
            "contexts": [{"name": "test", "context": {
                "cluster": "test", "user": "test", "namespace": "inference",
            }}],
        });
        std::fs::write(&path, config.to_string()).unwrap();
        path
    }

    /// Changes what is in the cluster; watches hear of it.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.shared.store.lock();
        let result = change(&mut store);
        self.shared.changed.send_replace(store.version());
        result
    }

    pub(crate) fn put(&self, resource: &str, object: Value) {
        self.change(|store| store.put(resource, object));
    }

    pub(crate) fn edit(&self, resource: &str, name: &str, edit: impl FnOnce(&mut Value)) {
        assert!(self.change(|store| store.edit(resource, "inference", name, edit)));
    }

    pub(crate) fn delete(&self, resource: &str, name: &str) {
        assert!(self.change(|store| store.delete(resource, "inference", name)));
    }

    /// Lets the next `times` requests of a kind fail.
    pub(crate) fn fault(&self, what: &str, times: usize, fault: Fault) {
        let mut faults = self.shared.faults.lock();
        faults.retain(|(other, ..)| other != what);
        faults.push((what.to_owned(), times, fault));
        drop(faults);
        // Watches that are open take note as well.
        self.shared.changed.send_modify(|_| {});
    }

    pub(crate) fn no_faults(&self) {
        self.shared.faults.lock().clear();
    }

    pub(crate) fn is_messy(&self, is_messy: bool) {
        *self.shared.is_messy.lock() = is_messy;
    }

    pub(crate) fn set_groups(&self, groups: &[&str]) {
        *self.shared.groups.lock() = groups.iter().map(|group| (*group).to_owned()).collect();
    }

    pub(crate) fn asked(&self, what: &str) -> Vec<Asked> {
        let asked = self.shared.asked.lock();
        asked
            .iter()
            .filter(|asked| asked.what == what)
            .cloned()
            .collect()
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        let service = service_fn(move |request| {
            let shared = Arc::clone(&shared);
            async move { Ok::<_, Infallible>(answer(shared, request).await) }
        });
        connections.spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service);
            let _ = connection.await;
        });
    }
}

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Answer {
    let Some((query, object, asked)) = parse(&request) else {
        return status(
            404,
            "NotFound",
            "the server could not find the requested resource",
        );
    };
    shared.asked.lock().push(asked.clone());
    let group = request
        .uri()
        .path()
        .split('/')
        .nth(2)
        .unwrap_or_default()
        .to_owned();
    if group.starts_with("inference.networking") && !shared.groups.lock().contains(&group) {
        return status(
            404,
            "NotFound",
            "the server could not find the requested resource",
        );
    }
    if request
        .headers()
        .get("authorization")
        .is_none_or(|value| value != "Bearer secret")
    {
        return status(401, "Unauthorized", "Unauthorized");
    }
    let fault = shared.fault_of(&asked.what);
    match &fault {
        Some(Fault::Status(code, reason)) => {
            let message = format!("{} is {reason} by the test", asked.what);
            return status(*code, reason, &message);
        }
        Some(Fault::Hang) => std::future::pending().await,
        _ => {}
    }
    match asked.what.split(' ').next() {
        Some("list") => shared.list(&query, &asked),
        Some("watch") => watch_answer(&shared, query, &asked, fault),
        Some("get") => shared.scale(&query, &object),
        _ => {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            shared.set_scale(
                &query,
                &object,
                &asked,
                &body,
                matches!(fault, Some(Fault::Race)),
            )
        }
    }
}

/// `/api/v1/namespaces/{ns}/pods`, `/apis/{group}/{version}/namespaces/{ns}/{plural}/{name}/scale`.
fn parse(request: &Request<Incoming>) -> Option<(Query, String, Asked)> {
    let path = request.uri().path();
    let rest = path.strip_prefix("/api/v1/").or_else(|| {
        let rest = path.strip_prefix("/apis/")?;
        rest.splitn(3, '/').nth(2)
    })?;
    let (namespace, rest) = match rest.strip_prefix("namespaces/") {
        Some(rest) => rest.split_once('/')?,
        None => ("", rest),
    };
    let mut parts = rest.split('/');
    let resource = parts.next()?.to_owned();
    let name = parts.next().unwrap_or_default().to_owned();
    let subresource = parts.next();
    let pairs = request.uri().query().unwrap_or_default();
    let query: Vec<(String, String)> = pairs
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.to_owned(), decode(value)))
        .collect();
    let mut asked = Asked {
        what: String::new(),
        query,
    };
    asked.what = match (subresource, request.method()) {
        (Some(sub), &Method::GET) => format!("get {resource}/{sub}"),
        (Some(sub), &Method::PUT) => format!("update {resource}/{sub}"),
        (None, &Method::GET) if asked.get("watch") == Some("true") => format!("watch {resource}"),
        (None, &Method::GET) if name.is_empty() => format!("list {resource}"),
        _ => return None,
    };
    let text = |key: &str| asked.get(key).unwrap_or_default().to_owned();
    let selection = Query {
        resource,
        namespace: namespace.to_owned(),
        labels: text("labelSelector"),
        fields: text("fieldSelector"),
    };
    Some((selection, name, asked))
}

fn decode(text: &str) -> String {
    let mut bytes = text.bytes();
    let mut all = Vec::new();
    while let Some(byte) = bytes.next() {
        all.push(match byte {
            b'%' => {
                let digits = [bytes.next().unwrap(), bytes.next().unwrap()];
                u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap()
            }
            b'+' => b' ',
            other => other,
        });
    }
    String::from_utf8(all).unwrap()
}

impl Shared {
    fn fault_of(&self, what: &str) -> Option<Fault> {
        let mut faults = self.faults.lock();
        let at = faults
            .iter()
            .position(|(other, times, _)| other == what && *times > 0)?;
        faults[at].1 -= 1;
        Some(faults[at].2.clone())
    }

    fn list(&self, query: &Query, asked: &Asked) -> Answer {
        let store = self.store.lock();
        let limit = asked
            .get("limit")
            .map_or(usize::MAX, |limit| limit.parse().unwrap());
        let start: usize = asked
            .get("continue")
            .map_or(0, |token| token.parse().unwrap());
        let all = store.select(query);
        let end = start.saturating_add(limit).min(all.len());
        let mut metadata = json!({"resourceVersion": store.version().to_string()});
        if end < all.len() {
            metadata["continue"] = json!(end.to_string());
            metadata["remainingItemCount"] = json!(all.len() - end);
        }
        let items = &all[start.min(end)..end];
        json_answer(
            200,
            &json!({"apiVersion": "v1", "kind": "List", "metadata": metadata, "items": items}),
        )
    }

    fn scale(&self, query: &Query, name: &str) -> Answer {
        let store = self.store.lock();
        let workload = query.resource.as_str();
        match store.get(workload, &query.namespace, name) {
            Some(object) => json_answer(200, &scale_of(object)),
            None => status(404, "NotFound", &format!("{workload} {name:?} not found")),
        }
    }

    fn set_scale(
        &self,
        query: &Query,
        name: &str,
        asked: &Asked,
        body: &[u8],
        race: bool,
    ) -> Answer {
        let given: Value = serde_json::from_slice(body).unwrap();
        let mut store = self.store.lock();
        let workload = query.resource.as_str();
        if race {
            store.edit(workload, &query.namespace, name, |object| {
                object["metadata"]["annotations"] = json!({"changed": "by somebody else"});
            });
        }
        let Some(object) = store.get(workload, &query.namespace, name) else {
            return status(404, "NotFound", &format!("{workload} {name:?} not found"));
        };
        if object["metadata"]["resourceVersion"] != given["metadata"]["resourceVersion"] {
            return status(
                409,
                "Conflict",
                "the object has been modified; please apply your changes to the latest version and try again",
            );
        }
        let mut next = object.clone();
        next["spec"]["replicas"] = given["spec"]["replicas"].clone();
        if asked.get("dryRun") == Some("All") {
            return json_answer(200, &scale_of(&next));
        }
        let next = store.put(workload, next);
        json_answer(200, &scale_of(&next))
    }
}

fn scale_of(object: &Value) -> Value {
    let replicas = object["spec"]["replicas"].clone();
    json!({
        "apiVersion": "autoscaling/v1", "kind": "Scale",
        "metadata": {
            "name": object["metadata"]["name"], "namespace": object["metadata"]["namespace"],
            "uid": object["metadata"]["uid"], "resourceVersion": object["metadata"]["resourceVersion"],
        },
        "spec": {"replicas": replicas},
        "status": {"replicas": object["status"]["replicas"].as_u64().unwrap_or(0), "selector": "app=vllm"},
    })
}

fn watch_answer(shared: &Arc<Shared>, query: Query, asked: &Asked, fault: Option<Fault>) -> Answer {
    let from: u64 = asked.get("resourceVersion").unwrap().parse().unwrap();
    let seconds: u64 = asked.get("timeoutSeconds").unwrap().parse().unwrap();
    let (sender, receiver) = mpsc::channel(64);
    let shared = Arc::clone(shared);
    let what = asked.what.clone();
    // Ends with the body, whose receiver it notices.
    let task = async move {
        let stream = serve_watch(&shared, &query, from, &what, fault, &sender);
        let _ = tokio::time::timeout(Duration::from_secs(seconds), stream).await;
    };
    let body = WatchBody {
        receiver,
        task: Box::pin(task),
        is_over: false,
    };
    Response::new(BodyExt::boxed(body))
}

async fn serve_watch(
    shared: &Shared,
    query: &Query,
    mut from: u64,
    what: &str,
    mut fault: Option<Fault>,
    sender: &mpsc::Sender<std::io::Result<Bytes>>,
) -> Option<()> {
    let mut changed = shared.changed.subscribe();
    loop {
        match fault.take().or_else(|| shared.watch_fault(what)) {
            Some(Fault::Error(code, reason)) => {
                let object = status_object(code, reason, "by the test");
                return send(sender, &json!({"type": "ERROR", "object": object})).await;
            }
            Some(Fault::End) => return None,
            Some(Fault::Break) => {
                let _ = sender
                    .send(Ok(Bytes::from_static(b"{\"type\":\"MODI")))
                    .await;
                let _ = sender.send(Err(std::io::Error::other("broken"))).await;
                return None;
            }
            Some(Fault::Garbage) => {
                let line = Bytes::from_static(b"{\"type\":\"MODIFIED\",\"object\":7}\n");
                sender.send(Ok(line)).await.ok()?;
            }
            _ => {}
        }
        let (events, version) = {
            let store = shared.store.lock();
            (store.since(from, query), store.version())
        };
        let Some(mut events) = events else {
            let object = status_object(410, "Expired", "too old resource version");
            return send(sender, &json!({"type": "ERROR", "object": object})).await;
        };
        if *shared.is_messy.lock() {
            events.reverse();
            events.extend(events.clone());
        }
        for event in &events {
            send(sender, event).await?;
        }
        from = version;
        if tokio::time::timeout(shared.bookmarks, changed.changed())
            .await
            .is_err()
        {
            let metadata = json!({"resourceVersion": from.to_string(), "creationTimestamp": null});
            let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata});
            send(sender, &json!({"type": "BOOKMARK", "object": object})).await?;
        }
    }
}

impl Shared {
    /// Returns what goes wrong with a watch that is open; what goes wrong with requests is for those.
    fn watch_fault(&self, what: &str) -> Option<Fault> {
        let is_for_open = |fault: &Fault| !matches!(fault, Fault::Status(..) | Fault::Hang);
        let has = self
            .faults
            .lock()
            .iter()
            .any(|(other, times, fault)| other == what && *times > 0 && is_for_open(fault));
        has.then(|| self.fault_of(what))?
    }
}

async fn send(sender: &mpsc::Sender<std::io::Result<Bytes>>, event: &Value) -> Option<()> {
    sender
        .send(Ok(Bytes::from(format!("{event}\n"))))
        .await
        .ok()
}

fn status(code: u16, reason: &str, message: &str) -> Answer {
    json_answer(code, &status_object(code, reason, message))
}

fn status_object(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
}

fn json_answer(code: u16, value: &Value) -> Answer {
    let body = Full::new(Bytes::from(value.to_string())).map_err(|never| match never {});
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(body.boxed())
        .unwrap()
}

/// A watch's lines, made while they are read.
struct WatchBody {
    receiver: mpsc::Receiver<std::io::Result<Bytes>>,
    task: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
    is_over: bool,
}

impl Body for WatchBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if !self.is_over {
            self.is_over = self.task.as_mut().poll(context).is_ready();
        }
        let piece = self.receiver.poll_recv(context);
        piece.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}
