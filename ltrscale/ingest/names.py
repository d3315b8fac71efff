"""The words of a log's columns and labels in the ten languages of the largest shops, as hints of roles and grades.

The languages below are, in order, English, German, French, Spanish, Italian, Portuguese, Dutch, Polish, Japanese and
Chinese. Patterns match a name's plain form.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

from ltrscale.arrays import HIGHEST_LABEL

_SPELT = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "ł": "l", "œ": "oe", "æ": "ae", "ø": "o"})
_ACCENTS = re.compile("[\u0300-\u036f]")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@cache
def plain_name(name: str) -> str:
    """A name in lower case and without accents, its words divided by `_`.

    Example:
        >>> plain_name("istGekauft"), plain_name("Händler-Nr."), plain_name("Requête ID"), plain_name("購入フラグ")
        ('ist_gekauft', 'haendler_nr', 'requete_id', '購入フラグ')
    """
    text = _CAMEL.sub("_", unicodedata.normalize("NFKC", name)).lower().translate(_SPELT)
    text = unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text)))
    return re.sub(r"[\s./-]+", "_", text).strip("_")


def _any(*languages: str) -> str:
    """A regex group that matches the words of some languages."""
    return f"({'|'.join('|'.join(words.split()) for words in languages)})"


_LINK = "(s|n|en|es|ns)?"
"""Letters between a word and the next, as in Kunden-Nr, or a plural ending."""
_LIST = _any(
    "query search impression request srch qid list slate serp feed ranking",
    "such(e|anfrage|vorgang|ergebnis)? anfrage abfrage trefferliste",
    "requete recherche",
    "consulta busqueda",
    "ricerca interrogazione",
    "busca pesquisa",
    "zoek(opdracht|actie)? zoekvraag",
    "zapytani[ea] wyszukiwani[ea]",
    "検索 クエリ",
    "搜索 查询 检索 曝光",
)
_VISIT = _any(
    "session visit basket order invoice transaction trip receipt incident",
    "sitzung besuch bestell(ung)? auftrag rechnung beleg",
    "seance visite commande facture",
    "sesion visita pedido factura",
    "sessione ordine fattura",
    "sessao fatura",
    "sessie bezoek bestelling factuur",
    "sesj[ai] wizyt[ay] zamowieni[ea] faktur[ay]",
    "セッション 訪問 注文 伝票",
    "会话 访问 订单 发票",
)
_PERSON = _any(
    "user visitor customer cust session member client shopper household reader owner card",
    "kunde nutzer benutzer besucher sitzung mitglied",
    "utilisateur visiteur seance",
    "usuario cliente visitante sesion",
    "utente visitatore sessione",
    "sessao",
    "gebruiker klant bezoeker sessie",
    "uzytkownik(a)? klient(a)? sesj[ai]",
    "ユーザー? 顧客 会員 セッション",
    "用户 会员 顾客 客户 会话",
)
_THING = _any(
    "item doc document product article prop property asin sku hotel listing content offer stock movie song part gtin",
    "artikel produkt ware angebot dokument ean",
    "produit offre annonce",
    "producto articulo oferta documento",
    "prodotto articolo offerta",
    "produto artigo",
    "aanbod aanbieding",
    "towar(u)? oferty produktu artykul(u)?",
    "商品 製品 アイテム 記事 物件",
    "产品 货品 物品 宝贝 文章 文档",
)
_SORT = _any(
    "category cat brand seller shop store country region location destination type class subclass site device age",
    "vendor supplier merchant manufacturer",
    "kategorie marke verkaeufer haendler anbieter lieferant hersteller filiale land ort typ klasse geraet warengruppe",
    "categorie marque vendeur fournisseur magasin boutique pays appareil",
    "categoria marca vendedor proveedor tienda pais tipo dispositivo",
    "marchio venditore fornitore negozio paese",
    "fornecedor loja",
    "merk verkoper leverancier winkel apparaat soort",
    "kategori[ai] mark[ai] sprzedawc[ay] dostawc[ay] sklep(u)? kraj(u)? urzadzeni[ea]",
    "カテゴリー? ブランド メーカー 店舗 出品者 販売者 地域 端末",
    "类目 分类 品牌 卖家 商家 店铺 地区 设备",
)
_ID = (
    "_?"
    + _any(
        "id key no nr number code asin sku uuid guid",
        "nummer kennung schluessel",
        "numero",
        "codigo",
        "codice",
        "numer kod",
        "番号 コード",
        "编号 编码 号",
    )
    + "$"
)
_ID_OF = "^(id|nr|kod)_(d[aeou]_|du_)?"
"""The same before a word, as in `id_produit`."""
IDENTIFIER = rf"{_ID}|{_ID_OF}"


def _identified(words: str) -> str:
    """A pattern for the name of a thing's identifier."""
    return rf"(^|_){words}{_LINK}{_ID}|{_ID_OF}{words}{_LINK}$"


THING = rf"{_identified(_THING)}|(^|_){_THING}{_LINK}$"
PROPERTY = rf"{_identified(_SORT)}|(^|_){_SORT}{_LINK}$"
PERSON = rf"^{_PERSON}{_LINK}(_?{_ID})?$|{_ID_OF}{_PERSON}{_LINK}$"
QUERY = (
    rf"^{_LIST}{_LINK}{_ID}|{_ID_OF}{_LIST}{_LINK}$"
    r"|^(qid|query|search|impression|q|request|suche|suchanfrage|requete|zapytanie|検索|搜索)$"
)
LISTED = rf"{_LIST}.*{_ID}"
VISITED = rf"{_identified(_VISIT)}|(^|_){_VISIT}{_LINK}$|^(group|case){_LINK}({_ID}|$)"
LIST_OR_VISIT = rf"{_LIST}|{_VISIT}.*{_ID}"
ASKED = _any(
    "query search keyword term phrase",
    "such(begriff|wort|text) anfrage",
    "requete recherche mot_cle",
    "consulta busqueda palabra",
    "ricerca parola",
    "busca pesquisa palavra",
    "zoek(term|woord)",
    "zapytani fraza",
    "検索 キーワード",
    "搜索词 查询词 关键词",
)
TEXT = (
    r"name|title|text|desc|url|bezeichnung|titel|titre|nom$|titulo|nombre|titolo|nome$|naam|tytul|nazwa"
    r"|名|タイトル|标题"
)
POSITION = (
    r"(^|_)(position|pos|slot|(such|listen|anzeige|treffer)position|listenplatz|posicion|posizione|posicao|positie"
    r"|pozycja)$|^(rank|rang|platz|platzierung|place|puesto|posto|rango|colocacao|plek|plaats|miejsce)$"
    r"|(順位|掲載順|表示順|表示位置|位置|排名|排序|名次|位次)$"
)
_CLOCK = _any(
    "time date at on ts day",
    "zeit(punkt|stempel)? datum uhrzeit tag am um",
    "heure jour",
    "fecha hora dia",
    "data ora giorno",
    "tijd(stip)? dag",
    "czas dzien",
)
TIME = (
    r"time|date|_dt$|_at$|^at$|^ts$|timestamp|_on$|^day$|zeit|datum|_am$|heure|^jour|fecha|(^|_)hora|(^|_)data(_|$)"
    r"|tijd|czas|日時|時刻|日付|时间|日期"
)
EVENT_TIME = (
    r"^(event|search|query|request|impression|session|show|sent|click|log|visit|srch|order|invoice|transaction)\w*?_?"
    r"(time|date|at|on|ts|day)"
    rf"|^{_LIST}\w*?_?{_CLOCK}$|^(zeitpunkt|zeitstempel|horodatage|tijdstip)$|^(検索|閲覧|表示|搜索|曝光|访问)(日時|時刻|时间|日期)"
)
ITEM_TIME = (
    r"list|publish|creat|updat|releas|launch|birth|expir|regist|signup|first|last|due|since|checkin|arriv"
    r"|eingestellt|angelegt|erstellt|geaendert|veroeffentlicht|seit|geburt|cree|publi|mise_a_jour|ajout|cread|actualiz"
    r"|pubblic|aggiorn|criad|atualiz|aangemaakt|bijgewerkt|utworz|dodan|aktualiz|登録|公開|更新|発売|上架|发布|创建|注册"
)
WORTH = (
    r"revenue|gross|sales$|turnover|gmv|umsatz|erloes|chiffre_d_?affaires|recette|ingresos|ricav|fatturato|receita"
    r"|faturamento|omzet|opbrengst|przychod|売上|销售额|成交额"
)
"""Names of what a document brought."""
_JUDGED = _any(
    "label grade relevance rel target y judge?ment is_relevant relevant",
    "(relevance|esci|judge?ment|relevancy)_(label|grade|judge?ment) (median|mean|avg|average)_(relevance|judge?ment)",
    "relevanz (ist_)?relevant bewertungsstufe relevanzstufe relevanzurteil",
    "pertinence (est_)?pertinent",
    "relevancia (es_)?relevante",
    "rilevanza (e_)?rilevante",
    "(e_)?relevante",
    "relevantie (is_)?relevant",
    "trafnosc istotnosc (jest_)?trafn[ye]",
    "関連度 関連性 関連ラベル ラベル 正解",
    "相关度 相关性 标签 标注",
)
_EVENT = _any(
    "event event_type event_name action interaction outcome feedback behaviou?r(_type)?",
    "ereignis aktion handlung ereignistyp",
    "evenement interaction",
    "evento accion interaccion",
    "azione interazione",
    "acao interacao",
    "gebeurtenis actie",
    "zdarzenie akcja",
    "イベント 行動",
    "事件 行为(类型)?",
)
_BOUGHT = _any(
    "purchas bought ^(is_)?sold$ order(ed)?$ booking booked converted conversion",
    "(^|_)(ge|ver)?kauft?(_|$) (^|_)kaeufe$ bestellt bestellung(en)?$ gebucht buchung(en)?$",
    "achat achete commandee?$ reservee?$",
    "(^|_)compr(a|ado|o)$ pedido$ reservado",
    "acquist comprato ordinato prenotat",
    "(^|_)compr(ado|ou)$ encomend",
    "gekocht aankoop besteld geboekt",
    "kupion zakup zamowion",
    "購入 注文 予約 買",
    "购买 下单 成交 支付 订单",
)
_KEPT = _any(
    "cart basket saved wishlist favou?rite engaged",
    "warenkorb merkzettel merkliste wunsch(liste|zettel) gemerkt",
    "panier favori",
    "carrito cesta favorit",
    "carrello preferit",
    "carrinho cesto",
    "winkelwagen winkelmand verlanglijst",
    "koszyk ulubion",
    "カート かご お気に入り",
    "购物车 加购 收藏",
)
CLICKED = (
    r"^(is_)?click(ed)?s?$|click_bool|^(ist_|an|wurde_)?(ge)?klick(t|s)?$|^angeklickt$|^(est_|a_)?(clic|clique|cliquee?)s?$"
    r"|^(es_)?clic(s|ado)?$|^cliccato$|^(foi_)?(clicado|clique|clicou)$|^(is_)?(aan)?ge?klikt$|^klik(s|niet[ey]|niecie|niecia)?$"
    r"|クリック(有無|フラグ)?$|^(是否)?点击$|是否点击"
)
"""Names of clicks."""
_CAUSE = (
    r"^(is_)?(fault|faulty|failed|failure|defect|defective|root_cause|culprit|cause|hit|won|hired|applied)$"
    r"|^(ist_)?(fehler|defekt|ursache|schuld)$"
)
_LABELS = (
    (WORTH, 2.2),
    (rf"^{_JUDGED}s?$", 5.0),
    (rf"^{_EVENT}$", 4.5),
    (_BOUGHT, 4.0),
    (_KEPT, 3.5),
    (_CAUSE, 3.5),
    (CLICKED, 3.0),
)
"""Names of labels, strongest first, with their points."""
PERHAPS = (
    r"(^|_)(label|grade|judge?ment|relevance|rating|stars|bewertung|note|nota|avaliacao|valoracion|puntuacion|voto"
    r"|valutazione|beoordeling|waardering|ocena)s?$|評価$|评分$|打分$"
)
"""Names that labels and features share, such as a rating: of this row, or of the item by earlier users."""
_BEFORE = (
    r"^[fn]_|share|rate|ratio|mean|avg|median|total|count|ctr|past|last|prev|hist|prior|_\d+[hdwmy]|_(score|days?)$"
    r"|anteil|quote$|anzahl|letzt|bisher|durchschnitt|mittel|summe|_tagen?$|_wochen?$|taux|nombre|(^|_)nb_|moyen"
    r"|dernier|_jours$|tasa|promedio|ultim|_dias$|tasso|_giorni$|taxa|aantal|gemiddeld|laatste|_dagen$|liczba|wskaznik"
    r"|sredni|ostatni|_dni$|率|平均|過去|直近|累計|日間|过去|近\d|累计|\d天"
)


def has(name: str, *patterns: str) -> bool:
    """True if the plain form of a name matches one of the patterns."""
    return any(re.search(pattern, plain_name(name)) for pattern in patterns)


def label_points(name: str) -> float:
    """The points of a name as a label, for what happened after a list was shown; 0 for what happened before."""
    judged = has(name, rf"^{_JUDGED}s?$")  # such as the median of several judgements
    if has(name, _BEFORE) and not judged:
        return 0.0
    return next((points for pattern, points in _LABELS if has(name, pattern)), 0.0)


def is_unnamed(name: str) -> bool:
    """True if a name is one that data frames write for a column without a name, such as their index."""
    return re.fullmatch(r"\s*|Unnamed: ?\d+(\.\d+)?|\.\.\.\d+", name) is not None


MOST_GRADES = 32
"""The most distinct values of a label."""

_LEVELS: Sequence[tuple[int, str]] = (
    (0, r"^(view(ed)?|shown?|impressions?|none|skip(ped)?|ignored?|bad|off_topic|unrelated)$|irrelevan|irrilevan"),
    (0, r"^(not|non|nicht|pas|no|niet|nie)_|^un(passend|wichtig)|^hors_sujet|^nieistotn|^schlecht$|無関係|関連なし"),
    (0, r"^(angezeigt|gezeigt|vue?|visto|bekeken|wyswietlon[ey])$|^不|无关|不相关|^(表示|閲覧|曝光|浏览)$"),
    (7, r"excellent|(highly|very|extremely|sehr|hoch|tres|muy|molto|muito|zeer|bardzo)_|ausgezeichnet"),
    (7, r"非常に|高度|非常"),
    (3, r"partial|partly|somewhat|substitut|moderate|teilweise|ersatz|partiel|parcial|parzial|gedeeltelijk"),
    (3, r"czesciow|部分"),
    (2, r"complement|marginal|slight|^fair$|^weak|maybe|ergaenz|ausreichend|補完|互补|一般"),
    (1, r"^poor$|^schwach"),
    (9, r"purchas|^(buy|bought|order|sale|sold)|book(ed|ing)?$|convert|conversion|(^|_)(ge|ver)?kauft?$"),
    (9, r"bestell|gebucht"),
    (9, r"^achat|^achet|command|^compr|pedido|acquist|gekocht|aankoop|besteld|kupion|zakup|購入|注文|购买|下单|支付"),
    (5, r"cart|basket|wish|^fav|^save|^like|warenkorb|merk(liste|zettel)|panier|carrit|cesta|carrell|carrinho"),
    (5, r"winkelwagen|koszyk|カート|お気に入り|购物车|加购|收藏"),
    (4, r"click|^open|detail|visit|klick|^cli[cq]|klik|クリック|点击"),
    (8, r"^(exact|perfect|ideal|vital|genau|perfekt|parfait|perfect[oa]|perfett[oa]|perfeit[oa])|完全|完璧"),
    (6, r"^(good|gut|bon|bueno|buono|bom|goed|dobr[ye]|relevant[eo]?|pertinent|trafn[ye]|関連|相关)"),
)
"""The strength of a word, from 0 to 9; the first matching pattern counts."""
_TWO = {
    **dict.fromkeys(("no", "n", "nein", "false", "f", "non", "nao", "nee", "nie", "いいえ", "否", "0", "無"), 0),
    **dict.fromkeys(("yes", "y", "ja", "j", "true", "t", "oui", "si", "sim", "tak", "はい", "是", "1", "有"), 1),
}
_ESCI = {"E": 3, "S": 2, "C": 1, "I": 0}
"""The letters of the shopping queries' judgements: exact, substitute, complement, irrelevant."""


def word_grades(values: Sequence[str]) -> dict[str, float | None]:
    """A grade for each word, None if it is not known."""
    numbers = {value: _number(value) for value in values}
    if any(number is not None for number in numbers.values()):
        return dict(numbers)
    words = {value: plain_name(value) for value in values}
    for scale in (_TWO, {plain_name(letter): grade for letter, grade in _ESCI.items()}):
        if {*words.values()} <= {*scale}:
            return {value: scale[word] for value, word in words.items()}
    levels = {value: _level(word) for value, word in words.items()}
    ranks = sorted({level for level in levels.values() if level is not None} | {0})  # the least good is still some good
    return {value: None if level is None else ranks.index(level) for value, level in levels.items()}


def are_grades(values: Sequence[str]) -> bool:
    """True if most of some words are known as grades or user actions, and they are not only yes and no."""
    known = [value for value in values if _level(plain_name(value)) is not None]
    return len(known) >= 2 and 2 * len(known) > len(values)


def _level(word: str) -> int | None:
    return next((level for level, pattern in _LEVELS if re.search(pattern, word)), None)


def _number(value: str) -> float | None:
    if not re.fullmatch(r"\d{1,4}([.,]\d+)?", value.strip(), re.ASCII):
        return None
    number = float(value.strip().replace(",", "."))
    whole = int(number)
    return (whole if number == whole else number) if number <= HIGHEST_LABEL else None
