//! Running the proxy and its admin listener: start, accept, drain, stop.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use kvlane::Router;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

pub use crate::config::ServeArgs;

use crate::admin;
use crate::app::App;
use crate::client_io::ClientIo;
use crate::config::{Config, ConfigError, seconds};
use crate::net::HostPort;
use crate::open_files;
use crate::pool::{rebalance, sources};
use crate::proxy::ProxyBody;
use crate::request::Tokenize;
use crate::signals::Ending;
use crate::sparing::warn_sparingly;
use crate::tokenizer;

/// A running sidecar. Dropping it stops it without waiting.
#[derive(Debug)]
pub struct ServeHandle {
    /// Where the proxy listens.
    pub proxy_addr: SocketAddr,
    /// Where the admin listener listens.
    pub admin_addr: SocketAddr,
    /// The router.
    pub router: Arc<Router>,
    app: Arc<App>,
    accepting: CancellationToken,
    stop: CancellationToken,
    connections: TaskTracker,
    tasks: TaskTracker,
}

/// Why the sidecar did not start.
#[derive(Debug)]
pub enum StartError {
    /// The configuration is refused.
    Config(ConfigError),
    /// An address cannot be listened on.
    Listen {
        /// The configuration key.
        key: &'static str,
        /// The address.
        address: HostPort,
        /// What the system says.
        source: std::io::Error,
    },
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Listen {
                key,
                address,
                source,
            } => write!(f, "{key} {address}: cannot listen: {source}"),
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Listen { source, .. } => Some(source),
        }
    }
}

/// Runs `kvlane serve` until a signal ends it: 0 after an orderly end, 2 when the configuration is refused, 1 when an
/// address cannot be had.
///
/// # Errors
/// Those of [`Ending::watch`].
pub async fn run(args: ServeArgs) -> kvlane::Result<ExitCode> {
    let mut ending = Ending::watch()?;
    let started = async {
        let config = Config::from_args(&args).map_err(StartError::Config)?;
        open_files::allow(config.max_connections);
        start(config).await
    };
    let started = tokio::select! {
        started = started => started,
        () = ending.asked() => {
            info!("stopped before it had started");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let handle = match started {
        Ok(handle) => handle,
        Err(problem) => {
            error!("{problem}");
            return Ok(ExitCode::from(
                if matches!(problem, StartError::Config(_)) {
                    2
                } else {
                    1
                },
            ));
        }
    };
    ending.asked().await;
    info!("stopping: open requests are finished first; another signal stops at once");
    tokio::select! {
        () = handle.shutdown() => info!("stopped"),
        () = ending.asked() => warn!("stopped at once"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts the sidecar on the current runtime and returns when it listens.
///
/// Workers need not be up; nor need a tokenizer load: requests are then matched as text, which is logged once.
///
/// # Errors
/// [`StartError`].
pub async fn start(mut config: Config) -> Result<ServeHandle, StartError> {
    config.finish().map_err(StartError::Config)?;
    config.warnings.sort();
    config.warnings.dedup();
    for warning in &config.warnings {
        warn!("{warning}");
    }
    let config = Arc::new(config);
    let proxy_listener = listen("listen", &config.listen).await?;
    let admin_listener = listen("admin", &config.admin).await?;
    let (tokenizer, problem): (Option<Arc<dyn Tokenize>>, _) = match &config.model {
        Some(path) => {
            let (tokenizer, problem) = tokenizer::load(path.clone()).await;
            (Some(tokenizer), problem)
        }
        None => (None, None),
    };
    let refused = |error: kvlane::Error| StartError::Config(ConfigError(error.to_string()));
    let (accepting, stop) = (CancellationToken::new(), CancellationToken::new());
    let (connections, tasks) = (TaskTracker::new(), TaskTracker::new());
    let app =
        App::new(Arc::clone(&config), tokenizer, tasks.clone(), stop.clone()).map_err(refused)?;
    if let Some(why) = problem {
        app.reader
            .complain("the model's tokenizer or template cannot be used", &why);
    }
    sources::start(&app).map_err(StartError::Config)?;
    let processes = sources::start_processes(&app).await;
    processes.map_err(StartError::Config)?;
    let balance = rebalance::start(&app).await;
    balance.map_err(StartError::Config)?;
    let handle = ServeHandle {
        proxy_addr: address_of(&proxy_listener, &config.listen, "listen")?,
        admin_addr: address_of(&admin_listener, &config.admin, "admin")?,
        router: Arc::clone(&app.router),
        app: Arc::clone(&app),
        accepting,
        stop,
        connections,
        tasks,
    };
    handle.spawn_all(proxy_listener, admin_listener, &config);
    info!(proxy = %handle.proxy_addr, admin = %handle.admin_addr, policy = config.policy.as_str(), "listening");
    Ok(handle)
}

impl ServeHandle {
    /// Returns the parts, to look at and to change workers.
    #[must_use]
    pub const fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Stops: no new connections, open requests are finished up to the configured deadline, then everything ends.
    pub async fn shutdown(self) {
        self.app.begin_stopping();
        self.accepting.cancel();
        self.connections.close();
        let deadline = seconds(self.app.config.shutdown_seconds);
        if tokio::time::timeout(deadline, self.connections.wait())
            .await
            .is_err()
        {
            warn!(
                open = self.connections.len(),
                "requests were cut off at the deadline"
            );
        }
        if let Some(processes) = self.app.processes.get() {
            processes.stop().await;
        }
        self.stop.cancel();
        self.tasks.close();
        let app = Arc::clone(&self.app);
        // Ending the subscriber waits for its thread.
        let _ = tokio::task::spawn_blocking(move || app.stop_events()).await;
        let _ = tokio::time::timeout(Duration::from_secs(5), self.tasks.wait()).await;
        self.router.close();
    }

    fn spawn_all(&self, proxy: TcpListener, admin: TcpListener, config: &Arc<Config>) {
        let (app, stop) = (Arc::clone(&self.app), self.stop.clone());
        self.tasks.spawn(async move {
            let mut interval = tokio::time::interval(Duration::from_millis(250));
            interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    _ = interval.tick() => app.tick(),
                }
            }
        });
        let settings = Accept {
            idle: seconds(config.client_idle_timeout_seconds),
            places: Arc::new(Semaphore::new(config.max_connections)),
            accepting: self.accepting.clone(),
            stop: self.stop.clone(),
            connections: self.connections.clone(),
        };
        let handler = Arc::clone(&self.app.proxy);
        let serve = move |request, close| Arc::clone(&handler).handle(request, close);
        self.tasks.spawn(accept(proxy, settings.clone(), serve));
        let settings = Accept {
            // The admin listener answers until the very end, so that the drain can be watched.
            accepting: self.stop.clone(),
            connections: self.tasks.clone(),
            places: Arc::new(Semaphore::new(256)),
            ..settings
        };
        let app = Arc::clone(&self.app);
        let serve = move |request, _close| admin::handle(Arc::clone(&app), request);
        self.tasks.spawn(accept(admin, settings, serve));
    }
}

impl Drop for ServeHandle {
    fn drop(&mut self) {
        self.app.begin_stopping();
        self.accepting.cancel();
        self.stop.cancel();
    }
}

/// How connections are accepted.
#[derive(Clone)]
struct Accept {
    idle: Duration,
    places: Arc<Semaphore>,
    accepting: CancellationToken,
    stop: CancellationToken,
    connections: TaskTracker,
}

async fn accept<F, A>(listener: TcpListener, settings: Accept, serve: F)
where
    F: Fn(Request<Incoming>, CancellationToken) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Result<Response<ProxyBody>, Infallible>> + Send + 'static,
{
    loop {
        let next = async {
            let place = Arc::clone(&settings.places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = settings.accepting.cancelled() => return,
            next = next => next,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = serve_connection(stream, settings.clone(), serve.clone());
                settings.connections.spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(problem) => {
                // Out of file descriptors, or a client that left in the queue: neither is a reason to stop.
                warn_sparingly!(cause = %problem, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve_connection<F, A>(stream: TcpStream, settings: Accept, serve: F)
where
    F: Fn(Request<Incoming>, CancellationToken) -> A + Send + 'static,
    A: Future<Output = Result<Response<ProxyBody>, Infallible>> + Send + 'static,
{
    // Without this the end of a small response waits for the client's delayed acknowledgement.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let close = CancellationToken::new();
    let service = {
        let close = close.clone();
        service_fn(move |request| serve(request, close.clone()))
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(settings.idle)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(ClientIo::new(stream, settings.idle)), service);
    let mut connection = pin!(connection);
    tokio::select! {
        // An error here is the client's: it left, or sent what is no HTTP.
        _ = connection.as_mut() => return,
        () = settings.stop.cancelled() => return,
        () = settings.accepting.cancelled() => {}
        () = close.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = connection => {}
        () = settings.stop.cancelled() => {}
    }
}

async fn listen(key: &'static str, address: &HostPort) -> Result<TcpListener, StartError> {
    TcpListener::bind((address.host(), address.port()))
        .await
        .map_err(|source| StartError::Listen {
            key,
            address: address.clone(),
            source,
        })
}

fn address_of(
    listener: &TcpListener,
    address: &HostPort,
    key: &'static str,
) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|source| StartError::Listen {
        key,
        address: address.clone(),
        source,
    })
}
