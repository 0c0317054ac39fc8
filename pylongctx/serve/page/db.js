// IndexedDB: conversations, their messages one by one, and what is large (texts of files, chunk maps).

const STORES = { conversations: [], messages: ["conversation"], parts: ["conversation"] };
let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("pylongctx", 1);
    request.onupgradeneeded = () => {
      for (const [name, indexes] of Object.entries(STORES)) {
        const store = request.result.createObjectStore(name, { keyPath: "id" });
        for (const index of indexes) store.createIndex(index, index);
      }
    };
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function run(mode, names, work) {
  const transaction = (await database()).transaction(names, mode);
  return new Promise((resolve, reject) => {
    transaction.onabort = () => reject(transaction.error);
    try {
      const request = work(...names.map((name) => transaction.objectStore(name)));
      transaction.oncomplete = () => resolve(request?.result);
    } catch (error) {
      reject(error); // before the abort, which has no reason
      transaction.abort();
    }
  });
}

/** Return the result of the request that `work` makes with the stores. */
export const read = (names, work) => run("readonly", names, work);

/** Let `work` write all or nothing; the promise fails when it has not. */
export const write = (names, work) => run("readwrite", names, work);

export const all = (name) => read([name], (store) => store.getAll());

export const one = (name, id) => read([name], (store) => store.get(id));

/** Return the messages or the parts of a conversation. */
export const of = (name, id) => read([name], (store) => store.index("conversation").getAll(id));

export const isFull = (error) => error?.name === "QuotaExceededError";
